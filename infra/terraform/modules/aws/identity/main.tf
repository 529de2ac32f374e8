# Permissions of one kind of machine. Nodes read their secrets, use their region's data, and write
# their region's checkpoint parts. They cannot read another region's rows, nor write the records of
# the cluster and of runs. The head writes these, and rents machines if an autoscaler runs there.

locals {
  # A region has at most 1000 parameter servers. One character each, so that eu does not match eu-ps.
  own = var.runs == null ? [] : concat(
    [for signs in ["?", "??", "???"] : "${var.runs.region}-ps${signs}"], ["model-${var.runs.region}", "averager"],
  )
  parts = [for file in local.own : "${var.runs.arn}/runs/*/checkpoints/*/${file}.safetensors"]
}

data "aws_caller_identity" "here" {}

data "aws_partition" "here" {}

data "aws_iam_policy_document" "machines" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "this" {
  statement {
    sid       = "Secrets"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = var.secret_arns
  }

  statement {
    sid       = "Keys"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = var.kms_key_arns
  }

  dynamic "statement" {
    for_each = length(var.bucket_arns) > 0 ? [var.bucket_arns] : []
    content {
      sid       = "Lists"
      actions   = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
      resources = statement.value
    }
  }

  dynamic "statement" {
    for_each = length(var.bucket_arns) > 0 ? [var.bucket_arns] : []
    content {
      sid       = "Objects"
      actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
      resources = [for arn in statement.value : "${arn}/*"]
    }
  }

  # A node reads checkpoints and its region's generated data. It writes the checkpoint parts of its
  # region's parameter servers, the final model, and the averager's part, since the averager may move
  # to any region. Manifests, events and leases are written by the run actor on the head.
  dynamic "statement" {
    for_each = var.runs == null ? [] : [var.runs]
    content {
      sid       = "RunLists"
      actions   = ["s3:ListBucket"]
      resources = [statement.value.arn]

      condition {
        test     = "StringLike"
        variable = "s3:prefix"
        values   = ["runs/*"]
      }
    }
  }

  dynamic "statement" {
    for_each = var.runs == null ? [] : [var.runs]
    content {
      sid     = "RunReads"
      actions = ["s3:GetObject"]
      resources = [
        "${statement.value.arn}/runs/*/checkpoints/*",
        "${statement.value.arn}/runs/*/data/${statement.value.region}/*",
      ]
    }
  }

  dynamic "statement" {
    for_each = var.runs == null ? [] : [var.runs]
    content {
      sid       = "RunParts"
      actions   = ["s3:PutObject", "s3:AbortMultipartUpload"]
      resources = local.parts
    }
  }

  # A part can be written once and never replaced.
  dynamic "statement" {
    for_each = var.runs == null ? [] : [var.runs]
    content {
      sid       = "RunPartsOnce"
      effect    = "Deny"
      actions   = ["s3:PutObject"]
      resources = local.parts

      condition {
        test     = "Null"
        variable = "s3:if-none-match"
        values   = ["true"]
      }

      # Only the end of a multipart upload creates the object.
      condition {
        test     = "Bool"
        variable = "s3:ObjectCreationOperation"
        values   = ["true"]
      }
    }
  }

  # Session Manager without the managed policy, which lets a machine read every parameter.
  statement {
    sid = "Sessions"
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
    resources = ["*"] # these know no resources
  }

  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid       = "Look"
      actions   = ["ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory", "pricing:GetProducts"]
      resources = ["*"] # these know no resources
    }
  }

  # Machines can be rented and ended only with the cluster's tag, which the head does not have.
  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid     = "Rent"
      actions = ["ec2:RunInstances"]
      resources = [
        "arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:instance/*",
        "arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:volume/*",
      ]

      condition {
        test     = "StringEquals"
        variable = "aws:RequestTag/geo-ray:cluster"
        values   = [var.cluster]
      }
    }
  }

  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid     = "RentWith"
      actions = ["ec2:RunInstances"]
      resources = [
        "arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:network-interface/*",
        "arn:${data.aws_partition.here.partition}:ec2:*::image/*",
      ]
    }
  }

  # Only in the stack's own networks, behind its own security groups.
  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid       = "RentThere"
      actions   = ["ec2:RunInstances"]
      resources = [for kind in ["subnet", "security-group"] : "arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:${kind}/*"]

      condition {
        test     = "StringEquals"
        variable = "aws:ResourceTag/geo-ray:stack"
        values   = [var.name]
      }
    }
  }

  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid       = "Tag"
      actions   = ["ec2:CreateTags"]
      resources = ["arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:*/*"]

      condition {
        test     = "StringEquals"
        variable = "ec2:CreateAction"
        values   = ["RunInstances"]
      }

      condition {
        test     = "StringEquals"
        variable = "aws:RequestTag/geo-ray:cluster"
        values   = [var.cluster]
      }
    }
  }

  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid       = "End"
      actions   = ["ec2:TerminateInstances"]
      resources = ["arn:${data.aws_partition.here.partition}:ec2:*:${data.aws_caller_identity.here.account_id}:instance/*"]

      condition {
        test     = "StringEquals"
        variable = "aws:ResourceTag/geo-ray:cluster"
        values   = [var.cluster]
      }
    }
  }

  dynamic "statement" {
    for_each = var.rents ? [1] : []
    content {
      sid       = "Pass"
      actions   = ["iam:PassRole"]
      resources = var.passed_role_arns

      condition {
        test     = "StringEquals"
        variable = "iam:PassedToService"
        values   = ["ec2.amazonaws.com"]
      }
    }
  }
}

resource "aws_iam_role" "this" {
  name               = "${var.name}-${var.kind}"
  description        = "geo_ray: ${var.kind} of ${var.cluster}"
  assume_role_policy = data.aws_iam_policy_document.machines.json
}

resource "aws_iam_role_policy" "this" {
  name   = "geo-ray"
  role   = aws_iam_role.this.id
  policy = data.aws_iam_policy_document.this.json
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-${var.kind}"
  role = aws_iam_role.this.name
}
