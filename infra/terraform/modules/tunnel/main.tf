# User data of a tunnel's end (WireGuard), for any cloud.

locals {
  script = templatefile("${path.module}/tunnel.sh.tftpl", {
    cloud  = var.cloud
    secret = var.secret
    python = var.python
    peers  = var.peers
    port   = 51820
  })
}
