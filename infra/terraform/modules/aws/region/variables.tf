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

variable "cidr" {
  description = "Addresses of this region, a network of 16 bits."
  type        = string
}

variable "cluster_cidrs" {
  description = "Networks of all regions of the cluster, this one among them."
  type        = list(string)
}

variable "zones" {
  description = "Availability zones with a subnet; null: the region's first two."
  type        = list(string)
  default     = null
}

variable "nat" {
  description = "Whether machines reach the internet, out only."
  type        = bool
  default     = true
}

variable "public_subnet" {
  description = "Whether there is a public subnet without a NAT gateway, too: for a link to another cloud."
  type        = bool
  default     = false
}

variable "operator_cidrs" {
  description = "Addresses from which people may use SSH on the head."
  type        = list(string)
  default     = []
}

variable "secrets" {
  description = "What the module secrets gives."
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
  description = "Machine image of this region that carries geo_ray; docs/operations/cloud-accounts.md has its recipe."
  type        = string

  validation {
    condition     = can(regex("^ami-[0-9a-zA-Z]+$", var.image_id))
    error_message = "An image of AWS is called ami-..."
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
  description = "The image's own name of its root volume."
  type        = string
  default     = "/dev/sda1"
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also removes the data of this region."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Of machines and volumes, which a provider's default tags do not reach."
  type        = map(string)
}
