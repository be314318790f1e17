"""Every error that a user can meet, in one place: each says what, how much, and what to do."""


class CleaveError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 1


class InputError(CleaveError):
    """What the user gave cannot be used: a recipe, a file, an argument."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe has an unknown key, a wrong value, or points at a missing file."""


class FleetError(InputError):
    """A fleet, or one of its devices, is described in a way that cannot be true."""


class CaptureError(InputError):
    """The module's training step cannot be turned into one graph."""


class BatchError(InputError):
    """A batch does not have the shapes that the step graph was captured with."""


class PlanError(InputError):
    """No placement of tiles on devices can satisfy the fleet's limits."""


class ClusterError(CleaveError):
    """The Dask cluster lacks something a step needs: the server, the plugin, a device."""


class StepError(CleaveError):
    """A step failed while it ran; the weights are those of the step before."""


class DistrustedError(StepError):
    """A step stands on unchecked tiles of a device that has since sent a wrong one; it is done again."""


class CheckpointError(CleaveError):
    """A checkpoint cannot be written or read; what was saved before is untouched."""


class ForeignCheckpointError(CheckpointError, InputError):
    """A checkpoint is whole, but of another model or of a version that this one cannot read."""


class AccessError(CleaveError):
    """Somebody is not, or no longer, allowed to do what they ask for."""


class NameTakenError(AccessError):
    """Somebody has joined under this name before, and still may."""
