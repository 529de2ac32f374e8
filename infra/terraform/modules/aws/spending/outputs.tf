output "topic_arn" {
  description = "Topic of alarms."
  value       = aws_sns_topic.alarms.arn
}
