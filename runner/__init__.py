"""The bundled engine: a decoder over a paged, prefix-cached KV pool, served like vLLM."""
