"""Every part of mlx-lm that caches/, models/ and samplers/ rely on beyond its API.

Each line names an object, who relies on it, on what, and the SHA-256 of its source
text at mlx-lm 0.32.2. When a new mlx-lm changes one, the test of this table says
what to read again; once it holds, the new digest goes in here.
"""

from dataclasses import dataclass

MLX_LM_VERSION = "0.32.2"


@dataclass(frozen=True, slots=True)
class Touch:
    """One object of mlx-lm.

    Attributes:
        module: where it is defined.
        name: its name there, with dots inside classes.
        used_by: the file here that relies on it.
        reason: what has to stay true.
        sha256: the digest of its source text, without decorators.
    """

    module: str
    name: str
    used_by: str
    reason: str
    sha256: str


TOUCHES = (
    Touch(
        "mlx_lm.models.cache",
        "KVCache.__init__",
        "caches/kv.py",
        "keys, values and offset are all it holds",
        "e2ba0de23641063a2cd93c726d64ef63009693342c053364472c514f50c75ffe",
    ),
    Touch(
        "mlx_lm.models.cache",
        "KVCache.update_and_fetch",
        "caches/kv.py",
        "rows from offset on are overwritten and never read",
        "f8fa7b2baac9f1521b0a8f5419abc9929e097a2027013d8e1cecc0f9cecffbeb",
    ),
    Touch(
        "mlx_lm.models.cache",
        "KVCache.keys_and_values",
        "caches/kv.py",
        "rows up to offset are the content",
        "11afc875d98faa69ac4b5bb491bb39b7598a9843d85e843a7ca93bbc34cf8060",
    ),
    Touch(
        "mlx_lm.models.cache",
        "KVCache.make_mask",
        "caches/kv.py",
        "the mask follows from offset",
        "1b9558753b9e0eb994d4632670e4503999e1084781b4448afa5255023d4c3177",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache.__init__",
        "caches/rotating.py",
        "keys, values, offset, _idx, keep, max_size are all",
        "bbd28fd3cbd92652fcdaad3d7c50630e592f32aad449734f4550191ef73355ee",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache.update_and_fetch",
        "caches/rotating.py",
        "one row goes in place, several are appended",
        "9d4d8a98b18d9ca2f69f70ab2f18ab25f14bda060eee7c63f9923b6f0e4c124e",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache._update_in_place",
        "caches/rotating.py",
        "which slot is taken, and when arrays are new",
        "663ce20a6c4c8cb165b1a462a17fc3a5f0411da818c0833f9cd8ab9b5ede0704",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache._update_concat",
        "caches/rotating.py",
        "makes new arrays and leaves the rows in order",
        "700af67b4e45d022a9467dfbac5640956dcc581d0823bed200e90fe73fd27d29",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache._temporal_order",
        "caches/rotating.py",
        "a ring cut to _idx rows is taken as ordered",
        "529212ea3716930c1eb330d244d61e9f7be3c2a7daeb464da6e5fd5b924bddf3",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache._trim",
        "caches/rotating.py",
        "evicts the oldest rows after the first keep",
        "bf3c529c90e5c031ece3ea76ec305f8e25d9e4f9cd6812b9caea7bcd196dcc93",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache.make_mask",
        "caches/rotating.py",
        "masks follow from offset, _idx and max_size",
        "2fc5a1c461dc4891d15128ca1a327dc37dc90b5fc603af89d7d2bd9ed70ade38",
    ),
    Touch(
        "mlx_lm.models.cache",
        "RotatingKVCache.keys_and_values",
        "caches/rotating.py",
        "rows past offset are not shown",
        "11afc875d98faa69ac4b5bb491bb39b7598a9843d85e843a7ca93bbc34cf8060",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ArraysCache.__init__",
        "caches/arrays.py",
        "cache, left_padding and lengths are all it holds",
        "2382aa0be3be10f5618c0f88ae3ddf08728e8acf0d72186b2b253292b29f96f5",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ArraysCache.__setitem__",
        "caches/arrays.py",
        "every slot is written through it",
        "ad596a3101f0a98d9d36c70c9595ea54b9e8ab9ed311e4fbe6c113a6a73a2ff3",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ArraysCache.advance",
        "caches/arrays.py",
        "changes lengths and left_padding in place",
        "e8c7150f33ec85101ace97fa8eba2ae6b2ab13fb30915925060f76a7e0d340f9",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ArraysCache.make_mask",
        "caches/arrays.py",
        "masks follow from lengths and left_padding",
        "78bd02ffe8e348b3d3852d5506327923a8611a2cf834509c6a3635c7f04bd971",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ArraysCache.empty",
        "caches/arrays.py",
        "slot 0 tells",
        "23b68cc038ce89d983cd03e92016efecc08594e7df454e9953f6966bec3070b6",
    ),
    Touch(
        "mlx_lm.models.cache",
        "CacheList.__init__",
        "caches/kinds.py",
        "caches are the members",
        "d1dba66a5ad073a675e0838973710a839ab73c1e5aa660952708dab9e96492db",
    ),
    Touch(
        "mlx_lm.models.cache",
        "CacheList.__getitem__",
        "caches/kinds.py",
        "models reach the members by index",
        "a39875ccef8897753146ae9e1dd998bc1a152afdaf56c9c011dcdc14ee6c0c11",
    ),
    Touch(
        "mlx_lm.models.cache",
        "_BaseCache",
        "caches/kinds.py",
        "has no __len__ and no __bool__",
        "31f9c5960cf24d205e808f013f8dfab98ac6d49155d31d47b22ee973d63a992c",
    ),
    Touch(
        "mlx_lm.models.cache",
        "make_prompt_cache",
        "models/lane.py",
        "one cache for each entry that the model expects",
        "7cde4e9fdb0c1b5ae55ea373fe2f75907d1800a968c919b6dc887cb6a63ccfcd",
    ),
    Touch(
        "mlx_lm.models.cache",
        "QuantizedKVCache.__init__",
        "caches/kv.py",
        "tuples of buffers, offset, group_size, bits are all",
        "50511670a548ce33fcb0862fe28f2a2bd17fbfc2ec6873a94af69f113c2e11a1",
    ),
    Touch(
        "mlx_lm.models.cache",
        "QuantizedKVCache.update_and_fetch",
        "caches/kv.py",
        "rows from offset on are overwritten and never read",
        "1a03852f80c5fba2e11f61da1af50d664a24229d1902d3f4f20707d944976dc1",
    ),
    Touch(
        "mlx_lm.models.cache",
        "QuantizedKVCache.keys_and_values",
        "caches/kv.py",
        "rows up to offset are the content",
        "9e7a4c114832b6e66a5b5685784c96de1b8ea6bc9b449f66a85cb42bdd9eb53a",
    ),
    Touch(
        "mlx_lm.models.cache",
        "QuantizedKVCache.make_mask",
        "caches/kv.py",
        "the mask follows from offset",
        "1b9558753b9e0eb994d4632670e4503999e1084781b4448afa5255023d4c3177",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ConcatenateKVCache",
        "caches/concatenated.py",
        "every write makes new arrays; offset counts their rows",
        "47afd503e3974ebdd2d36e37811eca5abd97419f7a67386b1b88832217a3c801",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ChunkedKVCache.__init__",
        "caches/chunked.py",
        "keys, values, offset, start_position, chunk_size are all",
        "8854ed653a04d6a97a2cb595f862aa6b700eb22ccfdebfd9df347d7745ec4e2b",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ChunkedKVCache.maybe_trim_front",
        "caches/chunked.py",
        "replaces both arrays where it drops rows",
        "a7e4cd0b0985a72210dea5a2962d86f5517e532a2761d8abe87c6b0445e2baef",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ChunkedKVCache.update_and_fetch",
        "caches/chunked.py",
        "writes reach no row before offset",
        "368165a4e98133f9c60370cd992a0ee265ee32945437a41d3441e0cf3bcd8511",
    ),
    Touch(
        "mlx_lm.models.cache",
        "ChunkedKVCache.keys_and_values",
        "caches/chunked.py",
        "rows up to offset are the content",
        "7413385c3a662e0372aa4931bd2da337bc45c5feaba7edb4b50ca7bb9e379ede",
    ),
    Touch(
        "mlx_lm.models.deepseek_v41",
        "LayerCache",
        "caches/compressed.py",
        "seven fields are all; every write makes new arrays",
        "d45a39a23a1aff944d5abaddedd6fc43fee40d89eb3bec61442f8431a9f93aed",
    ),
    Touch(
        "mlx_lm.models.deepseek_v41",
        "Attention.__call__",
        "caches/compressed.py",
        "the window is written first, then the rest",
        "d1f8ff62cdb023dbd7ef03fb036e76a884315e4ed0819b6ecd94c8ae0615c082",
    ),
    Touch(
        "mlx_lm.models.deepseek_v41",
        "Attention._compress",
        "caches/compressed.py",
        "closed groups are appended, never changed",
        "e55c07e71d47cc9677a23b41104273e78b4c447b35d1ddd3b29b0290cc161e01",
    ),
    Touch(
        "mlx_lm.models.deepseek_v41",
        "Compressor.__call__",
        "models/recording.py",
        "positions on axis 1; writes the pending rows alone",
        "abf3e13e35f669755fb51b626b8a72e11c389a07be45f23907c3cda7db2f45a4",
    ),
    Touch(
        "mlx_lm.models.base",
        "create_causal_mask",
        "caches/rotating.py",
        "the window of a mask counts rows by index",
        "f5ab1820ef1f5d7a5d73a348dceffbce6744330e083eb5250c335a9d960e9fbd",
    ),
    Touch(
        "mlx_lm.models.base",
        "create_attention_mask",
        "caches/journal.py",
        "calls make_mask with these keywords on a truthy cache",
        "df652de771cf9ed3dd62af94e9c58edfd281493d3f8393553339d7441af261d6",
    ),
    Touch(
        "mlx_lm.models.base",
        "create_ssm_mask",
        "caches/journal.py",
        "calls make_mask on a truthy cache",
        "dc8941cd462df9c9e0fa68380292ec0681b71771345e7acba2f8d9726ac23829",
    ),
    Touch(
        "mlx_lm.models.base",
        "scaled_dot_product_attention",
        "caches/journal.py",
        "an attribute bits means a quantized cache",
        "a13838be6e6c52935314c46df94093a4fc63bdfc6e08df305394e4f6cce720f9",
    ),
    Touch(
        "mlx_lm.models.bailing_moe_linear",
        "LinearAttention.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "f6c7fdfd8eb4f4ca744107d779be4460034f77553781ada51afcd25b09b0d9aa",
    ),
    Touch(
        "mlx_lm.models.bailing_moe_v3",
        "BailingKDA.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "2ec34fc015a76e07f2879004fca2c9134c8fb7a61516309803801eaf67e79de6",
    ),
    Touch(
        "mlx_lm.models.lfm2",
        "ShortConv.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "92f91df4a4e67ba11dc5d749336b46723d248977144d6cfac9eb50b73ec5b456",
    ),
    Touch(
        "mlx_lm.models.mamba",
        "MambaBlock.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "f93689a775c59d1fa3c491bd009ec91a4ae37939b12af3deb4686e1acb644948",
    ),
    Touch(
        "mlx_lm.models.mamba2",
        "Mamba2Block.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "796a6f9269e8c6ab150c006d7029318fa84763015b73f97c54d0fef4ccbfd083",
    ),
    Touch(
        "mlx_lm.models.nemotron_h",
        "NemotronHMamba2Mixer.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "ac2c6d0d9ffb2fe34255379bb294222aea9b4685680e1a7cea733183c975a822",
    ),
    Touch(
        "mlx_lm.models.qwen3_5",
        "GatedDeltaNet.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "62a5ed95b9af1525d97f6dcae728ce6d72e378fcb1889feeb09584df0ca1a4dc",
    ),
    Touch(
        "mlx_lm.models.qwen3_next",
        "Qwen3NextGatedDeltaNet.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "d9141df8348af09242f66ba59fe5711565a6415b6bb3a40bf096b2a0417c7699",
    ),
    Touch(
        "mlx_lm.models.recurrent_gemma",
        "RecurrentBlock.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "5b63366ca8142a3c479268692d277fdfb47a2034fee2be1279f9bacd4c3dfcd9",
    ),
    Touch(
        "mlx_lm.models.rwkv7",
        "Rwkv7ChannelMixing.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "ae64520281fc2455034dcfc4e610a685baff88a9baf37c95a47d6273d614b334",
    ),
    Touch(
        "mlx_lm.models.rwkv7",
        "Rwkv7TimeMixing.__call__",
        "models/recording.py",
        "positions on axis 1; state in the cache alone",
        "2322bcc8ab106266f95c8604491c4b92628e319cbdd66636e04f5fce7ff17525",
    ),
    Touch(
        "mlx_lm.sample_utils",
        "apply_top_p",
        "samplers/filters.py",
        "keeps the smallest set above top_p",
        "2975f5aef552657f4655701a9045a2e3ab2af461910151d8f1c0b84591759689",
    ),
    Touch(
        "mlx_lm.sample_utils",
        "apply_min_p",
        "samplers/filters.py",
        "keeps min_tokens_to_keep at least",
        "9c722ca12bfe07d0d3497d859ed065495c76877d337e63530aaa64b23be71368",
    ),
    Touch(
        "mlx_lm.tokenizer_utils",
        "StreamingDetokenizer",
        "engine/text.py",
        "reset, add_token, finalize and last_segment",
        "f3f422e603135189bc6a885663c723ec2a82f664043c8a7ffbcd8663d1f37648",
    ),
    Touch(
        "mlx_lm.tokenizer_utils",
        "NaiveStreamingDetokenizer",
        "engine/text.py",
        "reset, add_token, finalize and last_segment",
        "cf3a8ac50411265d2e42778bf2fddb56548abf869e16fbe3840e462b409c3ece",
    ),
    Touch(
        "mlx_lm.tokenizer_utils",
        "SPMStreamingDetokenizer",
        "engine/text.py",
        "reset, add_token, finalize and last_segment",
        "927a83a511dc0b4fcf8ad20a5ec9ade8650a98ef45d2ecc321caba1597e330c9",
    ),
    Touch(
        "mlx_lm.tokenizer_utils",
        "BPEStreamingDetokenizer",
        "engine/text.py",
        "reset, add_token, finalize and last_segment",
        "3922c9ede962a41b2d15597b70cbb7dea6462094b8150c85fdce1e63aba35732",
    ),
    Touch(
        "mlx_lm.tokenizer_utils",
        "TokenizerWrapper",
        "models/pairing.py",
        "eos_token_ids, detokenizer and get_vocab",
        "545d7ea2112e4bf9d9b589642971fd4154533ad9e1596744cfd0003ca85d11e1",
    ),
    Touch(
        "mlx_lm.utils",
        "dequantize_model",
        "models/loading.py",
        "replaces every quantized layer in place",
        "c76e666c66fcdac0db462a505b3649713774dfbe6f137c7129fc335707765979",
    ),
    Touch(
        "mlx_lm.generate",
        "wired_limit",
        "models/running.py",
        "a context manager, idle where memory is not wired",
        "0b6d0cc8c87c65324970cdda54df5f4cb6c097e7b9de4593c4ba09a5fe778adb",
    ),
)
