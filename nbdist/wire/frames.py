"""Messages as bytes, for the link between the notebook and an agent.

They are pickles: both ends run the same version of nbdist as the same user, over a
socket in a folder that only this user can open.  Whoever could write to it could run
code anyway, since running code is what it is for.
"""

from __future__ import annotations

import pickle

from nbdist.wire.messages import Down, Up


def to_bytes(message: Down | Up) -> bytes:
    """The message as one frame."""
    return pickle.dumps(message, protocol=5)


def down_from(frame: bytes) -> Down:
    """What the notebook told this agent."""
    message: Down = pickle.loads(frame)
    return message


def up_from(frame: bytes) -> Up:
    """What an agent told this notebook."""
    message: Up = pickle.loads(frame)
    return message
