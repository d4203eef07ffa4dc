"""``warmlane doctor``: what costs hits, whether a fleet may go live, and a bundle for support.

``diagnosis`` judges what a running gateway tells; ``checklist`` has the go-live lines, each a small
function in the module of its subject; ``bundle`` collects everything without secrets.
"""
