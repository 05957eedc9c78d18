"""The engine `vllm`: samples from vLLM servers over HTTP. This process never imports the package vllm."""
