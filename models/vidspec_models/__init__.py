"""Video language models as the engine drives them: loading, inputs, KV cache, decoder, sampling."""
