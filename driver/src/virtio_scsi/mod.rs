//! A virtio-scsi driver over vhost-user. Source: virtio 1.3 section 5.6, "SCSI Host Device".
