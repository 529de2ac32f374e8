variable "name" {
  description = "Of the stack; part of all names."
  type        = string
  default     = "geo-ray"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "2 to 20 small letters, digits and dashes, a letter first."
  }
}

variable "cluster" {
  description = "Name of the cluster, which machines that are rented beside Terraform bear as a tag; null: as the stack."
  type        = string
  default     = null
}

variable "image_ids" {
  description = "Machine image by region; docs/operations/cloud-accounts.md has its recipe."
  type        = map(string)

  validation {
    condition     = length(setsubtract(["eu", "sg", "jp"], keys(var.image_ids))) == 0
    error_message = "Every region needs an image: eu, sg and jp."
  }
}

variable "machines" {
  description = "What a plan or an autoscaler may rent, by region."
  type = map(list(object({
    type    = string
    cap     = number
    markets = optional(list(string), ["on_demand"])
  })))
  default = {
    eu = [{ type = "g5.xlarge", cap = 4, markets = ["on_demand", "spot"] }]
    sg = [{ type = "GN7.2XLARGE32", cap = 4, markets = ["on_demand"] }]
    jp = [{ type = "GN7.2XLARGE32", cap = 4, markets = ["on_demand"] }]
  }
}

variable "servers" {
  description = "Instance type of each region's parameter server and bridge; none: on a worker's."
  type        = map(string)
  default     = { eu = "m5.2xlarge", sg = "S5.2XLARGE32", jp = "S5.2XLARGE32" }
}

variable "zones" {
  description = "Availability zones of Tencent's regions with a subnet."
  type        = map(list(string))
  default     = { sg = ["ap-singapore-3", "ap-singapore-4"], jp = ["ap-tokyo-2"] }
}

variable "spot_max_prices" {
  description = "Most that an hour of a spot machine of Tencent may cost, by type, in the account's currency."
  type        = map(string)
  default     = {}
}

variable "tunnel_keys" {
  description = "Public key of each end of the tunnels between the clouds: wg genkey | tee private | wg pubkey."
  type        = map(string)

  validation {
    condition     = length(setsubtract(["eu", "sg", "jp"], keys(var.tunnel_keys))) == 0
    error_message = "Every end needs a key: eu, sg and jp."
  }
}

variable "token_version" {
  description = "A higher number makes another token; all nodes have to be started anew."
  type        = number
  default     = 1
}

variable "workers" {
  description = "Machines whose number Terraform owns, by region, as `geo-ray plan --out-tfvars` writes them; none: an autoscaler rents them."
  type = map(map(object({
    type   = string
    market = string
    role   = string
    count  = number
  })))
  default = {}

  validation {
    condition     = length(setsubtract(keys(var.workers), ["eu", "sg", "jp"])) == 0
    error_message = "This stack has the regions eu, sg and jp."
  }
}

variable "rents" {
  description = "Whether an autoscaler on the head may rent and end machines."
  type        = bool
  default     = true
}

variable "usd_per_month" {
  description = "What stack and machines may cost in a month before somebody is told."
  type        = number
  default     = 500
}

variable "emails" {
  description = "Who is told."
  type        = list(string)
  default     = []
}

variable "tls" {
  description = "Whether Ray encrypts what it says; then fill the secrets tls-* before machines start."
  type        = bool
  default     = false
}

variable "protected" {
  description = "Whether head, data and runs outlive `terraform destroy`: set it to false and apply first, if they shall not."
  type        = bool
  default     = true
}

variable "operator_cidrs" {
  description = "Addresses from which people may use SSH on the head; none are needed with Session Manager."
  type        = list(string)
  default     = []
}
