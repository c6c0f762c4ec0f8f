"""All families of heads by name."""

from support.references.mtp import ernie, glm, latent, mimo, nemotron, qwen, step
from support.references.mtp.base import Family

_MODULES = (
    ernie,
    glm,
    latent,
    mimo,
    nemotron,
    qwen,
    step,
)

FAMILIES: dict[str, Family] = {
    name.lower(): family
    for module in _MODULES
    for name, family in vars(module).items()
    if isinstance(family, Family)
}
