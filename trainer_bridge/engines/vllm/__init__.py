"""The engine vllm, which completes prompts on vLLM servers. The process of the run never imports vllm."""
