"""What every table of the configuration is made of: frozen, typed, and nothing unknown in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 10**9  # of anything counted: beyond it is a slip of the keyboard
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Threads = Annotated[int, Field(ge=1, le=4096)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the configuration file: frozen, and nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
