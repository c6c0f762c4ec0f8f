"""All families of heads by name."""

from support.references import (
    mtp_ernie,
    mtp_glm,
    mtp_latent,
    mtp_mimo,
    mtp_nemotron,
    mtp_qwen,
    mtp_step,
)
from support.references.mtp import Family

_MODULES = (
    mtp_ernie,
    mtp_glm,
    mtp_latent,
    mtp_mimo,
    mtp_nemotron,
    mtp_qwen,
    mtp_step,
)

FAMILIES: dict[str, Family] = {
    name.lower(): family
    for module in _MODULES
    for name, family in vars(module).items()
    if isinstance(family, Family)
}
