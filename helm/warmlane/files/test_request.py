"""One request through the gateway, as `helm test` sends it; exits 0 if it was served.

With tenants and no key for this test, being asked for one is the right answer.
"""

import os
import sys
import time

import httpx

# While workers load their model right after an install, and while a pool is full.
RETRIED = (429, 502, 503, 504)

url = os.environ["GATEWAY"] + "/v1/chat/completions"
key = os.environ.get("API_KEY", "")
asks_for_key = os.environ["NEEDS_KEY"] == "yes" and not key
deadline_s = time.monotonic() + float(os.environ["TIMEOUT_S"])
headers = {"x-warmlane-explain": "1"}
if key:
    headers["authorization"] = "Bearer " + key
body = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
}

while True:
    left_s = max(1.0, deadline_s - time.monotonic())
    try:
        # The certificate is for the name that clients use, not for the Service's.
        answer = httpx.post(url, json=body, headers=headers, timeout=left_s, verify=False)  # noqa: S501
    except httpx.TransportError as error:
        retry, problem = True, f"{url}: {error}"
    else:
        if answer.status_code == 200:
            text = answer.json()["choices"][0]["message"]["content"]
            print("served by", answer.headers.get("x-warmlane-worker"), "with", repr(text))
            sys.exit(0)
        if answer.status_code == 401 and asks_for_key:
            print("asked for a key, as it should be; set helmTest.apiKey for a whole request")
            sys.exit(0)
        retry = answer.status_code in RETRIED
        problem = f"status {answer.status_code}: {answer.text}"
    if not retry or time.monotonic() >= deadline_s:
        sys.exit("not served: " + problem)
    print("trying again:", problem)
    time.sleep(2)
