"""The Mamba-2 SSD: `mamba_chunk_scan_combined` for whole sequences, `selective_state_update` for one token."""
