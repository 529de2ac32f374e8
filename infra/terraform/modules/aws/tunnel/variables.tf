variable "name" {
  description = "Of the stack and this end; part of all names."
  type        = string
}

variable "vpc_id" {
  type = string
}

variable "cidr" {
  description = "Addresses of this network."
  type        = string
}

variable "subnet_id" {
  description = "Public subnet."
  type        = string
}

variable "route_table_id" {
  description = "Of the private subnets, which get the ways to the other clouds."
  type        = string
}

variable "image_id" {
  description = "The machine image, with wireguard-tools."
  type        = string
}

variable "python" {
  description = "Interpreter of the image."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "instance_type" {
  description = "Its network bounds what all regions behind it exchange."
  type        = string
  default     = "c6in.large"
}

variable "kms_key_arn" {
  description = "Key of the secret."
  type        = string
}

variable "peers" {
  description = "The other ends: public key, public address, and the network behind it."
  type        = list(object({ public_key = string, address = string, cidr = string }))
}
