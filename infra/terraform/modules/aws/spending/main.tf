# Notifications about costs and alarms. This budget ends nothing; the autoscaler ends machines at
# `plan.budget_usd` (docs/operations/autoscaler.md).

data "aws_caller_identity" "here" {}

data "aws_partition" "here" {}

resource "aws_kms_key" "topic" {
  description             = "${var.name} alarms"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.key.json
  tags                    = { Name = "${var.name} alarms" }
}

data "aws_iam_policy_document" "key" {
  statement {
    sid       = "Owner"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.here.partition}:iam::${data.aws_caller_identity.here.account_id}:root"]
    }
  }

  # An alarm that cannot encrypt its message sends nothing.
  statement {
    sid       = "Tellers"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.here.account_id]
    }
  }
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = aws_kms_key.topic.arn
}

data "aws_iam_policy_document" "topic" {
  statement {
    sid       = "Tellers"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms.arn]

    principals {
      type        = "Service"
      identifiers = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.here.account_id]
    }
  }
}

resource "aws_sns_topic_policy" "alarms" {
  arn    = aws_sns_topic.alarms.arn
  policy = data.aws_iam_policy_document.topic.json
}

resource "aws_sns_topic_subscription" "mail" {
  for_each = toset(var.emails)

  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = each.value
}

resource "aws_budgets_budget" "month" {
  name         = "${var.name}-month"
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = tostring(var.usd_per_month)
  limit_unit   = "USD"

  # Resources of Terraform, and machines rented by the autoscaler.
  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:geo-ray:stack$%s", var.name), format("user:geo-ray:cluster$%s", var.cluster)]
  }

  notification {
    comparison_operator       = "GREATER_THAN"
    notification_type         = "ACTUAL"
    threshold                 = 80
    threshold_type            = "PERCENTAGE"
    subscriber_sns_topic_arns = [aws_sns_topic.alarms.arn]
  }

  notification {
    comparison_operator       = "GREATER_THAN"
    notification_type         = "FORECASTED"
    threshold                 = 100
    threshold_type            = "PERCENTAGE"
    subscriber_sns_topic_arns = [aws_sns_topic.alarms.arn]
  }
}
