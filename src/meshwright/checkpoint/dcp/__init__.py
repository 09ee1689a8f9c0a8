"""Exchange with torch.distributed.checkpoint (DCP); all of checkpoint that needs torch."""

from meshwright.checkpoint.dcp.exchange import export_dcp, import_dcp
from meshwright.checkpoint.dcp.folder import DcpFolder
from meshwright.checkpoint.dcp.storage import CommitReader, CommitWriter

__all__ = ["CommitReader", "CommitWriter", "DcpFolder", "export_dcp", "import_dcp"]
