//! Applies entries of the event log to the history. One function handles each subject: hosts,
//! owners, tasks, suspensions, migrations, failures.

use super::{History, LogPosition, Table};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{DecisionKind, TaskOutcome, TaskUsage};

impl History {
    /// Applies the next entry of the event log. An entry that was applied before is ignored.
    pub fn apply_event(&mut self, event: &Event) {
        if event.number <= self.log_position.event_number {
            return;
        }
        self.log_position = LogPosition::after_event(event);
        self.changed_keys.insert((Table::LogPosition, 0));
        self.apply_vacate_event(&event.kind);
        self.apply_host_event(event);
        self.apply_owner_event(event);
        self.apply_task_event(event);
        self.apply_suspension_event(event);
        self.apply_migration_event(event);
        self.apply_failure_event(event);
    }

    /// Applies an event about a host: it joined, is no longer in the virtual machine, or is being
    /// drained.
    fn apply_host_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::HostAdded { host, name } => {
                self.set_host_name(*host, name);
                self.record_decision(event_time, DecisionKind::HostJoined { host: name.clone() });
            }
            EventKind::HostGone {
                host, name, why, ..
            } => {
                self.set_host_name(*host, name);
                self.record_decision(
                    event_time,
                    DecisionKind::HostGone {
                        host: name.clone(),
                        why: why.clone(),
                    },
                );
                self.record_host_loss(event_time, name);
                self.set_drain(*host, None);
            }
            EventKind::DrainStarted {
                host,
                requested_by: requester,
                deadline: wall_deadline,
            } => {
                self.set_drain(*host, Some((*requester, *wall_deadline)));
                self.record_decision(
                    event_time,
                    DecisionKind::Drain {
                        host: self.host_name(*host),
                        is_start: true,
                        requested_by: *requester,
                    },
                );
            }
            EventKind::DrainEnded {
                host,
                requested_by: requester,
            } => {
                self.set_drain(*host, None);
                self.record_decision(
                    event_time,
                    DecisionKind::Drain {
                        host: self.host_name(*host),
                        is_start: false,
                        requested_by: *requester,
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about the owner of a host: presence, permission for guests, or guests that
    /// were ended.
    fn apply_owner_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::OwnerPresent { host, why, .. } => {
                let host = self.host_name(*host);
                self.record_decision(
                    event_time,
                    DecisionKind::OwnerReturned {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::OwnerAbsent { host, why } => {
                let host = self.host_name(*host);
                self.record_decision(
                    event_time,
                    DecisionKind::OwnerLeft {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostClosed { host, why } => {
                let host = self.host_name(*host);
                self.record_decision(
                    event_time,
                    DecisionKind::HostClosed {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostOpened { host } => self.record_decision(
                event_time,
                DecisionKind::HostOpened {
                    host: self.host_name(*host),
                },
            ),
            EventKind::GuestsEnded { host, guests, why } if !guests.is_empty() => {
                guests.iter().for_each(|tid| self.record_eviction(*tid));
                let (host, tasks) = (self.host_name(*host), guests.clone());
                self.record_decision(
                    event_time,
                    DecisionKind::GuestsEnded {
                        host,
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about the start, the restart or the end of a task.
    fn apply_task_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            } => {
                self.record_task_start(event_time, *tid, (*parent, *user), name, event.host);
            }
            EventKind::Restarted {
                checkpoint: checkpoint_name,
                job,
                tasks,
                why,
            } => {
                self.merge_restarted(event_time, *job, tasks);
                let tasks = tasks
                    .iter()
                    .map(|(tid, host)| (*tid, self.host_name(*host)))
                    .collect();
                self.record_decision(
                    event_time,
                    DecisionKind::Restarted {
                        job: *job,
                        checkpoint: checkpoint_name.clone(),
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            EventKind::TaskEnded {
                tid,
                status,
                used: usage,
            } => {
                self.remove_childless_task(*tid);
                if let Some(number) = self.task_numbers.get(tid).copied() {
                    self.end_task(number, event_time, TaskOutcome::Status(*status), *usage);
                }
            }
            _ => {}
        }
    }

    /// Applies an event about a suspension or a resume.
    fn apply_suspension_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::Suspended { tid, cause } => {
                self.set_suspended(*tid, event_time, Some(cause.clone()));
                let host = self.host_of(*tid);
                self.record_decision(
                    event_time,
                    DecisionKind::Suspended {
                        tid: *tid,
                        host,
                        cause: cause.clone(),
                    },
                );
            }
            EventKind::Resumed { tid, cause } => {
                self.set_suspended(*tid, event_time, None);
                let host = self.host_of(*tid);
                self.record_decision(
                    event_time,
                    DecisionKind::Resumed {
                        tid: *tid,
                        host,
                        cause: cause.clone(),
                    },
                );
            }
            EventKind::JobSuspended {
                job,
                requested_by: requester,
            } => self.set_job_suspended(event_time, *job, *requester, true),
            EventKind::JobResumed {
                job,
                requested_by: requester,
            } => self.set_job_suspended(event_time, *job, *requester, false),
            _ => {}
        }
    }

    /// Applies an event about a migration that was completed or has failed.
    fn apply_migration_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::Migrated {
                tid,
                from: source,
                to: target,
                cause,
                bytes,
                frozen: freeze_duration,
                ..
            } => {
                self.record_migration(
                    *tid,
                    self.host_name(*target),
                    matches!(cause, MigrationCause::Owner { .. }),
                );
                let (source, target, cause) = (
                    self.host_name(*source),
                    self.host_name(*target),
                    cause.clone(),
                );
                self.record_decision(
                    event_time,
                    DecisionKind::Migrated {
                        tid: *tid,
                        from: source,
                        to: target,
                        cause,
                        bytes: *bytes,
                        frozen: *freeze_duration,
                    },
                );
            }
            EventKind::MigrationFailed {
                tid,
                from: source,
                to: target,
                cause,
                step,
                why,
                ..
            } => {
                let (source, target, cause, why) = (
                    self.host_name(*source),
                    self.host_name(*target),
                    cause.clone(),
                    why.to_string(),
                );
                self.record_decision(
                    event_time,
                    DecisionKind::MigrationFailed {
                        tid: *tid,
                        from: source,
                        to: target,
                        cause,
                        step: *step,
                        why,
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about a failure of a checkpoint, of a restart or of a tasker, or about a
    /// host that was refused.
    fn apply_failure_event(&mut self, event: &Event) {
        let event_time = event.at;
        match &event.kind {
            EventKind::CheckpointFailed { job, why } => {
                self.record_decision(
                    event_time,
                    DecisionKind::CheckpointFailed {
                        job: *job,
                        why: why.clone(),
                    },
                );
            }
            EventKind::RestartFailed {
                checkpoint: checkpoint_name,
                cause,
                why,
            } => {
                let (job, checkpoint_name) = (
                    self.job_of_checkpoint(checkpoint_name),
                    checkpoint_name.clone(),
                );
                self.record_decision(
                    event_time,
                    DecisionKind::RestartFailed {
                        job,
                        checkpoint: checkpoint_name,
                        cause: cause.clone(),
                        why: why.clone(),
                    },
                );
            }
            EventKind::TaskerGone { host, why } => {
                let host = self.host_name(*host);
                // Programs from a command line are not children of the tasker, so the end of the
                // tasker does not affect them.
                let is_affected = |task: &&TaskUsage| task.host == host && !task.program.is_empty();
                let tasks = self
                    .running_tasks()
                    .filter(is_affected)
                    .map(|task| task.tid)
                    .collect();
                self.record_decision(
                    event_time,
                    DecisionKind::TaskerGone {
                        host,
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostRefused { name, why } => {
                self.record_decision(
                    event_time,
                    DecisionKind::HostRefused {
                        host: name.clone(),
                        why: why.clone(),
                    },
                );
            }
            _ => {}
        }
    }
}
