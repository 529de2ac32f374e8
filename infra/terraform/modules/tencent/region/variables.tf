variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster: the tag geo-ray:cluster of its rented machines."
  type        = string
}

variable "region" {
  description = "Region of the run: the value of the label ray.io/availability-region."
  type        = string
}

variable "at" {
  description = "Region of the cloud, which is the provider's."
  type        = string
}

variable "cidr" {
  description = "Network of this region, a /16."
  type        = string
}

variable "cluster_cidrs" {
  description = "Networks of all regions of the cluster, including this one."
  type        = list(string)
}

variable "zones" {
  description = "Availability zones with a subnet."
  type        = list(string)
}

variable "secrets" {
  description = "Outputs of the module secrets."
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
  description = "Machine image of this region with geo_ray; docs/operations/cloud-accounts.md shows how to build it."
  type        = string

  validation {
    condition     = can(regex("^img-[0-9a-zA-Z]+$", var.image_id))
    error_message = "An image of Tencent Cloud must be img-..."
  }
}

variable "python" {
  description = "Python interpreter of the image."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "machines" {
  description = "Machine types that a plan or an autoscaler may use here."
  type = list(object({
    type    = string
    cap     = number
    markets = optional(list(string), ["on_demand"])
  }))
}

variable "server" {
  description = "Instance type for parameter server and bridge; null: on a worker's machine."
  type        = string
  default     = null
}

variable "pools" {
  description = "Machines that Terraform controls, by any name; empty if an autoscaler rents them."
  type = map(object({
    type   = string
    market = string
    role   = string
    count  = number
  }))
  default = {}
}

variable "spot_max_prices" {
  description = "Highest hourly price of spot machines, by type, in the account's currency."
  type        = map(string)
  default     = {}
}

variable "disk_gb" {
  description = "Size of the encrypted system disks."
  type        = number
  default     = 100
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also deletes the data of this region."
  type        = bool
  default     = false
}

variable "tags" {
  type = map(string)
}
