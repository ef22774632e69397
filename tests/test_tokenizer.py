"""Tokenizers from GGUF metadata and from folders, held against transformers' own."""

from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer, GenerationConfig

from memkv_pp.errors import ModelError
from memkv_pp.model.tokenizer import load_tokenizer
from memkv_pp.testing.tiny_models import write_tiny_gguf, write_tiny_model

SMOLLM2 = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = (
    "",
    " ",
    "Hello, world! It's the end.",
    "  leading and   inner   spaces\n\n\ttabs\r\n",
    "ünïcödé, 日本語, emoji 🙂‍↔️, العربية",
    "def f(x):\n    return x ** 2  # 12345678.90",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>tail",
    "<s>not special everywhere</s>",
    "\x00\x7f control",
)
CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]


def write_sentencepiece_gguf(path, *, add_bos):
    """A llama vocabulary of bytes and a few pieces; ``add_bos`` None leaves the flag out."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    writer = GGUFWriter(path, "llama")
    for key in ("block_count", "attention.head_count", "feed_forward_length", "context_length"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_embedding_length(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-1.0 - i for i in range(len(pieces))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_a_real_gguf_tokenises_as_transformers_does():
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is absent: `make model` fetches it")
    theirs = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    ours = load_tokenizer(SMOLLM2)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected
    assert ours.encode("Hi")[0] != theirs.bos_token_id  # this file's add_bos_token is false
    assert ours.end_ids == {0, 2}  # <|endoftext|> and <|im_end|>


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_and_a_gguf_tokenise_alike_and_every_text_round_trips(family, bos, tmp_path):
    folder = load_tokenizer(write_tiny_model(tmp_path, family, bos=bos))
    file = load_tokenizer(write_tiny_gguf(tmp_path, family, bos=bos))
    for text in TEXTS:
        ids = folder.encode(text)
        assert file.encode(text) == ids, text
        assert (263 in ids[:1]) == (bos or text.startswith("<s>")), text
        assert all(token < 320 for token in ids)
        assert file.decode(ids) == folder.decode(ids)
        if "<" not in text:
            assert file.decode(ids) == text
    assert file.encode_chat(CHAT) == folder.encode_chat(CHAT)
    assert file.end_ids == folder.end_ids == {264, 266, 267}


@pytest.mark.slow
def test_bos_handling_of_a_gguf_equals_transformers(tmp_path):
    for bos in (False, True):
        path = write_tiny_gguf(tmp_path / str(bos), "llama", bos=bos)
        theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        assert [load_tokenizer(path).encode(t) for t in TEXTS] == [theirs.encode(t) for t in TEXTS]


@pytest.mark.parametrize(("add_bos", "starts"), [(None, True), (True, True), (False, False)])
def test_a_sentencepiece_gguf_starts_with_bos_unless_it_says_otherwise(add_bos, starts, tmp_path):
    path = write_sentencepiece_gguf(tmp_path / "spm.gguf", add_bos=add_bos)
    ours = load_tokenizer(path)
    assert (ours.encode("ab a")[0] == 1) is starts
    assert ours.decode(ours.encode("ab a")) == "ab a"
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("ab a", " aab  b", "é", "</s>a"):
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.end_ids == {2}


def test_no_text_yields_an_id_beyond_the_vocabulary_of_the_file(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(c) for c in range(33, 127)), "te"])
    writer.add_token_merges(["t e"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(path)
    # The conversion invents this token, for which the model has no embedding.
    ids = tokenizer.encode("<|endoftext|>")
    assert max(ids) < 95
    assert tokenizer.decode(ids) == "<|endoftext|>"
    assert tokenizer.end_ids == frozenset()


def test_the_stated_end_tokens_of_a_folder_all_end(tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    GenerationConfig(eos_token_id=[264, 300]).save_pretrained(folder)
    assert load_tokenizer(folder).end_ids == {264, 266, 267, 300}


def test_a_model_without_a_chat_template_or_a_tokenizer_says_so(tmp_path):
    spm = load_tokenizer(write_sentencepiece_gguf(tmp_path / "spm.gguf", add_bos=None))
    with pytest.raises(ModelError, match=r"--chat.*no chat template"):
        spm.encode_chat(CHAT)
    bare = tmp_path / "bare.gguf"
    writer = GGUFWriter(bare, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens"):
        load_tokenizer(bare)
    folder = write_tiny_model(tmp_path / "folder", "llama")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(folder)
