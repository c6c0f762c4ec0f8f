"""Tiny random checkpoints of block drafters and EAGLE-3 heads, seeded.

`tiny_dspark`, `tiny_dflash2`, `tiny_eagle3` and `tiny_p_eagle` return what config.json
holds and float32 tensors under the names that the packaging publishes them with;
`tiny_inputs` returns what a target would give. They know nothing of the library.
"""
