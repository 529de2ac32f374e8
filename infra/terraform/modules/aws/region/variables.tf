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

variable "cidr" {
  description = "Network of this region, a /16."
  type        = string
}

variable "cluster_cidrs" {
  description = "Networks of all regions of the cluster, including this one."
  type        = list(string)
}

variable "zones" {
  description = "Availability zones with a subnet; null: the region's first two."
  type        = list(string)
  default     = null
}

variable "nat" {
  description = "Whether machines can open connections to the internet."
  type        = bool
  default     = true
}

variable "public_subnet" {
  description = "Whether to create a public subnet even without a NAT gateway, for a tunnel to another cloud."
  type        = bool
  default     = false
}

variable "operator_cidrs" {
  description = "Networks that may use SSH on the head."
  type        = list(string)
  default     = []
}

variable "secrets" {
  description = "Outputs of the module secrets."
  type = object({
    names       = map(string)
    arns        = list(string)
    kms_key_arn = string
  })
}

variable "runs" {
  description = "The bucket of the runs, as the module bucket gives it."
  type = object({
    name        = string
    arn         = string
    kms_key_arn = string
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
    condition     = can(regex("^ami-[0-9a-zA-Z]+$", var.image_id))
    error_message = "An image of AWS must be ami-..."
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

  validation {
    condition = alltrue([
      for kind in var.machines : sum(concat([0], [for pool in var.pools : pool.count if pool.type == kind.type && pool.role == "worker"])) <= kind.cap
    ])
    error_message = "More workers of a type than its cap in `machines`."
  }
}

variable "volume_gb" {
  description = "Size of the encrypted root volumes."
  type        = number
  default     = 100
}

variable "root_device" {
  description = "Name of the root volume in the image."
  type        = string
  default     = "/dev/sda1"
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also deletes the data of this region."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of machines and volumes, to which default tags of the provider do not apply."
  type        = map(string)
}
