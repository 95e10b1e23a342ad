"""Makes the links of README.md absolute in the package: PyPI shows the text without the files beside it."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Adds the description to the metadata; ``pyproject.toml`` has the address of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the text of README.md, whose links are paths in the repository, as the description."""
        text = (Path(self.root) / "README.md").read_text()
        repository = metadata["urls"]["Repository"]
        text = re.sub(r"^(\[[^\]]+\]: )(?=\S+\.svg$)", rf"\1{repository}/raw/main/", text, flags=re.M)
        text = re.sub(r"^(\[[^\]]+\]: )(?!https:)", rf"\1{repository}/blob/main/", text, flags=re.M)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
