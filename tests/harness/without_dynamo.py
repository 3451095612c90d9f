"""Keeps Dynamo out of a job: DDP and optimizers only ask it to leave them alone, and its import takes 1.9 s a rank."""

import sys
from unittest import mock

sys.modules["torch._dynamo"] = mock.MagicMock(disable=lambda function, *_, **__: function)
