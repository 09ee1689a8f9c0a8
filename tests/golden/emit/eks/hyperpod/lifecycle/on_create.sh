#!/bin/bash
# Run once on each new node, before it takes work.
set -euo pipefail
python3 -m venv /opt/meshwright
/opt/meshwright/bin/pip install meshwright==1.0
ln -sf /opt/meshwright/bin/meshwright /usr/local/bin/meshwright
# By this address the other nodes reach this one.
echo "MESHWRIGHT_HOSTS=$(hostname -I | cut -d' ' -f1)" >>/etc/environment
