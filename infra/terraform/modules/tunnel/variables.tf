variable "cloud" {
  description = "aws or tencent: of this machine."
  type        = string
}

variable "secret" {
  description = "Where the private key lies."
  type        = object({ store = string, region = string, name = string })
}

variable "python" {
  description = "Interpreter of the image, which also has wireguard-tools and iptables."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "peers" {
  description = "The other ends: public key, public address, and the network behind it."
  type        = list(object({ public_key = string, address = string, cidr = string }))

  validation {
    condition     = alltrue([for peer in var.peers : can(regex("^[A-Za-z0-9+/]{43}=$", peer.public_key)) && can(cidrhost(peer.cidr, 0))])
    error_message = "A peer has a public key as `wg pubkey` prints it, and a network."
  }
}
