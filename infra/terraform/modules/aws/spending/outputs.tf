output "topic_arn" {
  description = "Of alarms."
  value       = aws_sns_topic.alarms.arn
}
