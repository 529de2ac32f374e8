variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
  default     = "geo-ray"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "Give 2 to 20 lower-case letters, digits and dashes, starting with a letter."
  }
}

variable "cluster" {
  description = "Name of the cluster: the tag of machines that an autoscaler rents; null: the stack's name."
  type        = string
  default     = null
}

variable "image_ids" {
  description = "Machine image by region; docs/operations/cloud-accounts.md shows how to build it."
  type        = map(string)

  validation {
    condition     = length(setsubtract(["eu", "sg", "jp"], keys(var.image_ids))) == 0
    error_message = "Every region needs an image: eu, sg and jp."
  }
}

variable "machines" {
  description = "Machine types that a plan or an autoscaler may use, by region."
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
  description = "Instance type of each region's parameter server and bridge; empty: on a worker's machine."
  type        = map(string)
  default     = { eu = "m5.2xlarge", sg = "S5.2XLARGE32", jp = "S5.2XLARGE32" }
}

variable "zones" {
  description = "Availability zones of Tencent's regions with a subnet."
  type        = map(list(string))
  default     = { sg = ["ap-singapore-3", "ap-singapore-4"], jp = ["ap-tokyo-2"] }
}

variable "spot_max_prices" {
  description = "Highest hourly price of Tencent's spot machines, by type, in the account's currency."
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
  description = "A higher number creates another token; all nodes must be restarted."
  type        = number
  default     = 1
}

variable "workers" {
  description = "Machines that Terraform controls, by region, as written by `geo-ray plan --out-tfvars`; empty: an autoscaler rents them."
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
  description = "Monthly cost in USD at which the budget notifies."
  type        = number
  default     = 500
}

variable "emails" {
  description = "Email addresses that the budget notifies."
  type        = list(string)
  default     = []
}

variable "tls" {
  description = "Whether Ray uses TLS; if so, fill the secrets tls-* before machines start."
  type        = bool
  default     = false
}

variable "protected" {
  description = "Whether `terraform destroy` refuses to delete head, data and runs; set it to false and apply first to delete them."
  type        = bool
  default     = true
}

variable "operator_cidrs" {
  description = "Networks that may use SSH on the head; not needed with Session Manager."
  type        = list(string)
  default     = []
}
