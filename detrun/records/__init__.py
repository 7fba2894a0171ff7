"""Schema and version of every file on disk: writers, readers, the archive.

The recorder carries only the writing side into a training process; where both copies are on the path, the rest is
found behind it.
"""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
