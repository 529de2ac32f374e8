variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster, which its rented machines bear as the tag geo-ray:cluster."
  type        = string
}

variable "region" {
  description = "Region of the run: the value of the label ray.io/availability-region."
  type        = string
}

variable "at" {
  description = "The cloud's region, which is the provider's."
  type        = string
}

variable "cidr" {
  description = "Addresses of this region, a network of 16 bits."
  type        = string
}

variable "cluster_cidrs" {
  description = "Networks of all regions of the cluster, this one among them."
  type        = list(string)
}

variable "zones" {
  description = "Availability zones with a subnet."
  type        = list(string)
}

variable "secrets" {
  description = "What the module secrets gives."
  type = object({
    names    = map(string)
    readable = list(object({ region = string, name = string }))
  })
}

variable "head_address" {
  description = "HOST:PORT of the head."
  type        = string
}

variable "image_id" {
  description = "Machine image of this region that carries geo_ray; docs/operations/cloud-accounts.md has its recipe."
  type        = string

  validation {
    condition     = can(regex("^img-[0-9a-zA-Z]+$", var.image_id))
    error_message = "An image of Tencent Cloud is called img-..."
  }
}

variable "python" {
  description = "Interpreter of the image."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "machines" {
  description = "What an autoscaler or a plan may rent here."
  type = list(object({
    type    = string
    cap     = number
    markets = optional(list(string), ["on_demand"])
  }))
}

variable "server" {
  description = "Instance type for parameter server and bridge; null: on a worker's."
  type        = string
  default     = null
}

variable "pools" {
  description = "Machines whose number Terraform owns, by a name of your own; none if an autoscaler does."
  type = map(object({
    type   = string
    market = string
    role   = string
    count  = number
  }))
  default = {}
}

variable "spot_max_prices" {
  description = "Most that an hour of a spot machine may cost, by type, in the account's currency."
  type        = map(string)
  default     = {}
}

variable "disk_gb" {
  description = "Size of the encrypted system disks."
  type        = number
  default     = 100
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also removes the data of this region."
  type        = bool
  default     = false
}

variable "tags" {
  type = map(string)
}
