variable "name" {
  description = "Name of the stack and this end; part of all names."
  type        = string
}

variable "at" {
  description = "Region of the cloud."
  type        = string
}

variable "vpc_id" {
  type = string
}

variable "cidr" {
  description = "Network."
  type        = string
}

variable "subnet" {
  description = "Public subnet."
  type        = object({ id = string, cidr = string, zone = string })
}

variable "route_table_id" {
  description = "Route table of the private subnets, which gets the routes to the other clouds."
  type        = string
}

variable "image_id" {
  description = "Machine image with wireguard-tools."
  type        = string
}

variable "python" {
  description = "Python interpreter of the image."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "instance_type" {
  description = "Instance type; its network limits the traffic of the regions behind it."
  type        = string
  default     = "S5.MEDIUM4"
}

variable "mbps" {
  description = "Outgoing bandwidth in Mbit/s, billed by traffic."
  type        = number
  default     = 100
}

variable "peers" {
  description = "Other ends: public key, public address, and the network behind each."
  type        = list(object({ public_key = string, address = string, cidr = string }))
}

variable "tags" {
  type = map(string)
}
