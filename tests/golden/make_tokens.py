"""Tokenization goldens: `python make_tokens.py smollm2 TOKENIZER.json WIKI.raw OUT.json`
                    or `python make_tokens.py gemma MODEL.gguf WIKI.raw OUT.json`.

Ids come from a tokenizer that is not ours: for smollm2 the crate `tokenizers` reading tokenizer.json, for gemma
llama.cpp (through xllamacpp) reading the GGUF's vocabulary. Gemma's are checked against SentencePiece itself, fed a
model rebuilt from the same vocabulary; the run stops if the two ever disagree. Special tokens that appear in a text
are parsed as such, and no BOS or EOS is added to a case. `window` is the start of WIKI, with BOS where the model wants one.
"""

import json
import sys
import urllib.request

N_WINDOW = 1280

CASES = [
    # Plain words, case, apostrophes and the spaces around them.
    "", " ", "a", "Hello, world!", " Hello, world!", "Hello, world! ", "  two leading", "two trailing  ",
    "The quick brown fox jumps over the lazy dog.", "I'm you're we'll they've he'd it's DON'T CAN'T 'tis",
    "HELLO hello HeLLo hELLO", "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "a b  c   d    e     f", "x" + " " * 40 + "y", " " * 3, " " * 100, "\t", "\t\tindented\tcolumns\t\t\tend",
    # Line ends.
    "\n", "\n\n", "one\ntwo\n\nthree\n\n\nfour", "dos\r\nline\r\nends\r\n", "trailing newline\n", " \n \n ", "\n" * 40,
    "space before newline \nand after\n space", "paragraph\u2028separator\u2029here\u0085next",
    # Digits and numerals of other scripts.
    "0", "1234567890", "3.14159 2,718,281 1e-10 0xDEADBEEF", "v1.2.3-rc.4 2024-11-29T14:43:00Z", "007 42 1000000",
    "٠١٢٣٤٥٦٧٨٩", "①②③ ⅣⅫ ½¾ x²y³ ₁₂", "१२३ ๑๒๓ 一二三〇", "1a2b3c a1b2c3",
    # Scripts, composition and width.
    "naïve café résumé Ångström", "cafe\u0301 e\u0301\u0301 A\u030a", "Füße Straße ẞ ŒŸ", "Привет, мир! Ёлка",
    "你好，世界！今天天气很好。", "日本語のテキスト、カタカナとｶﾀｶﾅ", "한국어 문장입니다.", "नमस्ते दुनिया", "مرحبا بالعالم", "שלום עולם",
    "สวัสดีชาวโลก", "ＦＵＬＬ　ｗｉｄｔｈ", "ﬁ ﬂ Ǆ ℌ ㎏",
    # Emoji, joiners, astral characters, controls.
    "😀 🎉🚀", "👨‍👩‍👧‍👦 👍🏽 🇫🇷🇯🇵 ❤️", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 𠜎 \U0010fffd", "zero\u200bwidth\u200djoin\ufeffbom\u00adsoft",
    "nbsp\u00a0en\u2002em\u2003ideo\u3000thin\u2009", "nul\u0000bell\u0007esc\u001b[0mdel\u007f", "\u202eright to left\u202c", "bad\ufffdchar",
    # The metaspace and byte-alphabet characters that tokenizers use inside.
    "▁under▁score▁", "Ġspace Ċnewline ĉ", "<0x41> <0x00>",
    # Code, markup, addresses.
    "def f(x):\n    if x > 0:\n        return x ** 2\n\treturn None\n", "for (int i=0;i<n;++i){a[i]+=b[i]*c;}//done",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\\n\"}}", "<table><tr><td>1</td></tr></table><br/>",
    "https://example.org/path?q=1&r=two#frag user@example.org", "!!! ??? ... --- ___ *** ((())) [[[]]] $$$ %%% &&&",
    "“quoted” ‘single’ — dash – en … ellipsis", "C:\\dir\\file.txt ~/.bashrc && rm -rf ./*", "a=b; c!=d; e<=f; g=>h; i->j; k::l",
    " = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . ", "@-@ 1 @,@ 000 @.@ 5 <unk>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababababababababababab",
]

SPECIALS = {
    "smollm2": [
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "text<|endoftext|>text",
        "<|im_start|> spaced <|im_end|>", "<|im_start", "<repo_name>a/b<file_sep>x.py\nprint(1)", "<|IM_START|>",
    ],
    "gemma": [
        "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n", "<bos>text<eos>", "text<eos>text",
        "<start_of_turn> spaced <end_of_turn>", "<start_of_turn", "<unused7><unused6241>", "<START_OF_TURN>", "<mask>[multimodal]<pad>",
    ],
}


def smollm2(path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(path)
    return f"tokenizers {tokenizers.__version__} (Python) reading tokenizer.json", lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def sentencepiece_from(vocab):
    """SentencePiece's own BPE over the GGUF's pieces, scores and types (which share SentencePiece's numbering)."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb

    proto = pb.ModelProto()
    proto.trainer_spec.model_type = pb.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(vocab["tokens"])
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.bos_id, proto.trainer_spec.unk_id = 0, 1, 2, 3
    proto.trainer_spec.pad_piece, proto.trainer_spec.eos_piece, proto.trainer_spec.bos_piece = "<pad>", "<eos>", "<bos>"
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    for index, (token, score, kind) in enumerate(zip(vocab["tokens"], vocab["scores"], vocab["token_type"])):
        # A special token in the text is parsed: SentencePiece does that only for user-defined pieces. These are
        # matched after spaces became U+2581, which the GGUF undid in its user-defined pieces.
        special = kind == 3 and index > 3
        if kind == 4 or special:
            token = token.replace(" ", "\u2581")
        proto.pieces.add(piece=token, score=score, type=2 if index == 3 else 4 if special else kind)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return lambda text: processor.encode(text)


def gemma(path):
    import gguf
    import xllamacpp

    reader = gguf.GGUFReader(path)
    vocab = {key: reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type")}
    second = sentencepiece_from(vocab)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.cpuparams.n_threads = path, 256, False, 1
    server = xllamacpp.Server(params)

    def encode(text):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            ids = json.load(reply)["tokens"]
        # SentencePiece keeps ids 0 to 3 (pad, eos, bos, unk) out of text, so there llama.cpp stands alone.
        if not {0, 1, 2, 3} & set(ids) and ids != second(text):
            raise SystemExit(f"llama.cpp and SentencePiece disagree on {text!r}:\n{ids}\n{second(text)}")
        return ids

    return f"llama.cpp in xllamacpp {xllamacpp.__version__}, equal to sentencepiece with the GGUF's vocabulary", encode


def main():
    model, source, wiki, out = sys.argv[1:]
    name, encode = {"smollm2": smollm2, "gemma": gemma}[model](source)
    with open(wiki, encoding="utf-8", newline="") as file:
        text = file.read(12 * N_WINDOW)
    bos = [2] if model == "gemma" else []
    golden = {
        "source": name,
        "window": (bos + encode(text))[:N_WINDOW],
        "cases": [{"text": case, "ids": encode(case)} for case in CASES + SPECIALS[model]],
    }
    with open(out, "w", encoding="ascii") as file:
        head = {key: value for key, value in golden.items() if key != "cases"}
        rows = ",\n".join(json.dumps(case) for case in golden["cases"])
        file.write(json.dumps(head)[:-1] + ', "cases": [\n' + rows + "\n]}\n")
    print(f"{out}: {len(golden['cases'])} cases, {len(golden['window'])} ids of window")


main()
