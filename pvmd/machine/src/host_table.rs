//! Every daemon's part in changes of the host table, and dispatch of messages from other daemons.
//!
//! The master changes the table in two phases: it sends the new table to all hosts, and puts it
//! into force when all hosts have prepared it. Each order has an epoch; orders with an older epoch
//! are refused. When a table comes into force, the daemon connects to new hosts and handles the
//! loss of removed hosts.

use super::{Machine, Output};
use sempa_proto::host::{HostMsg, Location};
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::RmInfo;
use sempa_proto::{Epoch, HostId, Tid};

impl Machine {
    /// Handles a control message of another daemon. Orders are accepted only from the master.
    pub(super) fn handle_host_message(&mut self, host: HostId, message: HostMsg) {
        match message {
            HostMsg::PrepareTable { .. }
            | HostMsg::CommitTable { .. }
            | HostMsg::TaskLocation(_)
            | HostMsg::Halt { .. }
            | HostMsg::Shutdown
            | HostMsg::Rm { .. }
            | HostMsg::Tracer { .. }
            | HostMsg::EndTasks { .. }
            | HostMsg::SuspendDecided { .. }
            | HostMsg::DropCopies { .. }
            | HostMsg::HeartbeatAck { .. }
            | HostMsg::Summary(_)
            | HostMsg::MigrationOrder { .. } => {
                if host == HostId::MASTER {
                    self.handle_master_order(message);
                } else {
                    self.log_warning(format!(
                        "{host} sent an order that only the master may send; it was ignored"
                    ));
                }
            }
            HostMsg::TablePrepared { epoch } => self.handle_change_ack(host, epoch, false),
            HostMsg::TableCommitted { epoch } => self.handle_change_ack(host, epoch, true),
            HostMsg::TaskLocationAck { tid, epoch } => self.handle_location_ack(host, tid, epoch),
            HostMsg::Leaving { reason: why } => self.handle_host_leaving(host, &why),
            HostMsg::TaskRequest { tid, id, request } if self.master.is_some() => {
                self.handle_master_request(tid, id, request)
            }
            HostMsg::TaskPast { tid, clock, marks } => self.record_service_past(tid, clock, marks),
            HostMsg::TaskRequest { tid, .. } => {
                self.log_warning(format!(
                    "{host} sent a request of {tid} for the master here; it was dropped"
                ));
            }
            HostMsg::HostRequest {
                id,
                request: host_request,
            } => self.serve_host_request(super::rpc::ReplyAddress { host, id }, host_request),
            HostMsg::HostReply { id, reply } => self.handle_host_reply(host, id, reply),
            HostMsg::Message { message, past } => self.handle_daemon_message(message, past),
            HostMsg::Event { at, kind } => self.append_event(host, at, kind),
            HostMsg::TaskOutput { tid, bytes } if self.master.is_some() => {
                self.log_task_output(tid, bytes)
            }
            HostMsg::TaskOutput { .. } => {}
            HostMsg::TaskLeft { tid } => self.remove_from_services(tid),
            HostMsg::StepReport { migration, report } => {
                self.handle_step_report(host, migration, report)
            }
            HostMsg::SuspendMigrating {
                migration,
                id,
                order,
            } => self.pass_suspend_to_coordinator(host, migration, id, &order),
            HostMsg::CopyStored {
                migration,
                checkpoint,
                result,
            } => self.handle_copy_stored(host, migration, checkpoint, result),
            HostMsg::EndSignalSent { tid, signal } => self.record_end_signal(tid, signal),
            HostMsg::Heartbeat { number } => self.handle_heartbeat(host, number),
            HostMsg::KillLeftovers { tid } => self.kill_leftovers(tid),
        }
    }

    fn handle_master_order(&mut self, message: HostMsg) {
        match message {
            HostMsg::PrepareTable {
                table,
                locations,
                rm,
                reserved_local_max: reserved_ids_max,
            } => self.prepare_table(table, locations, rm, reserved_ids_max),
            HostMsg::CommitTable { epoch } => self.commit_table(epoch),
            HostMsg::TaskLocation(location) => self.handle_location(location),
            HostMsg::Halt { reason: why } => self.shut_down_orderly(&why),
            HostMsg::Shutdown => self.shut_down_now("by order of the master"),
            HostMsg::DropCopies { checkpoints } => self
                .outputs
                .push_back(Output::DropCheckpoints { checkpoints }),
            HostMsg::HeartbeatAck { number } => self.handle_heartbeat_ack(number),
            HostMsg::Summary(summary) => self.outputs.push_back(Output::KeepSummary { summary }),
            HostMsg::Rm { rm } => self.handle_master_rm(rm),
            HostMsg::Tracer { tracer } => self.set_tracer(tracer),
            HostMsg::EndTasks {
                exempt_tasks: surviving_tasks,
            } => self.end_tasks(&surviving_tasks),
            HostMsg::MigrationOrder { migration, order } => {
                self.handle_migration_order(migration, order)
            }
            HostMsg::SuspendDecided {
                migration,
                id,
                suspensions,
            } => self.handle_suspend_decision(migration, id, suspensions),
            _ => {}
        }
    }

    /// Records the epoch of an order if it is newer than the epochs of all earlier orders. Returns
    /// false for any other order, which must not be executed.
    fn accept_epoch(&mut self, epoch: Epoch, order: &str) -> bool {
        if epoch > self.epoch {
            self.epoch = epoch;
            return true;
        }
        self.log_warning(format!(
            "{order} of epoch {epoch} is older than {}; it was refused",
            self.epoch
        ));
        false
    }

    fn prepare_table(
        &mut self,
        table: HostTable,
        locations: Vec<Location>,
        rm: Option<RmInfo>,
        reserved_ids_max: u32,
    ) {
        let epoch = table.epoch;
        if !self.accept_epoch(epoch, "a host table") {
            return;
        }
        self.tasks.reserve_ids_up_to(reserved_ids_max);
        for location in locations {
            if location.tid.birth_host() == Some(self.config.host) {
                self.tasks.reserve_ids_up_to(location.tid.local_part());
            }
            self.locations.update(location);
        }
        self.handle_master_rm(rm);
        self.prepared_table = Some(table);
        self.send_to_host(HostId::MASTER, HostMsg::TablePrepared { epoch });
    }

    fn commit_table(&mut self, epoch: Epoch) {
        match self.prepared_table.take_if(|table| table.epoch == epoch) {
            Some(table) => {
                self.apply_table(table);
                self.send_to_host(HostId::MASTER, HostMsg::TableCommitted { epoch });
            }
            None => self.log_warning(format!(
                "the host table of epoch {epoch} was not prepared here; it was refused"
            )),
        }
    }

    /// Puts a table into force: connects to new hosts and handles the loss of removed hosts.
    pub(super) fn apply_table(&mut self, table: HostTable) {
        let old_table = std::mem::replace(&mut self.table, table);
        let removed_hosts: Vec<HostId> = old_table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| self.table.get(*id).is_none())
            .collect();
        let new_hosts: Vec<HostEntry> = self
            .table
            .hosts
            .iter()
            .filter(|h| old_table.get(h.id).is_none())
            .cloned()
            .collect();
        for host in removed_hosts {
            self.handle_host_removed(host);
        }
        self.renew_own_lease();
        let has_just_joined = old_table.hosts.is_empty();
        for entry in &new_hosts {
            // Of two slaves, the one with the higher host index opens the session. The session with
            // the master already exists.
            if entry.id < self.config.host && entry.id != HostId::MASTER {
                let addresses = entry.addresses.clone();
                self.outputs.push_back(Output::Connect {
                    host: entry.id,
                    addresses,
                });
            }
        }
        if has_just_joined {
            self.outputs.push_back(Output::StartTasker);
            self.start_commands();
        }
        let added_host_ids: Vec<HostId> = new_hosts.iter().map(|h| h.id).collect();
        if !has_just_joined && !added_host_ids.is_empty() {
            self.notify_hosts_added(&added_host_ids);
        }
    }

    /// Handles the removal of a host from the table. The tasks of the host count as dead.
    fn handle_host_removed(&mut self, host: HostId) {
        if self.master.is_none() {
            self.outputs.push_back(Output::Disconnect { host });
        }
        self.notify_host_lost(host);
        self.handle_rm_host_lost(host);
        self.fail_requests_to(host);
        self.forget_migration_host(host);
        if let Some(master) = &self.master {
            let mut involved_tasks = master.mailbox.involved_tasks();
            involved_tasks.extend(master.events.subscriber_tids());
            involved_tasks.extend(master.groups.all_members());
            involved_tasks.sort_unstable();
            involved_tasks.dedup();
            let dead_tasks: Vec<Tid> = involved_tasks
                .into_iter()
                .filter(|tid| self.location(*tid) == Some(host))
                .collect();
            for tid in dead_tasks {
                self.remove_from_services(tid);
            }
        }
    }

    /// Handles the loss of a host: its session has ended, or the host was silent for the duration
    /// of the lease. The master rolls back the jobs that had tasks on the host and removes the host
    /// from the table. A slave shuts down if the master is lost.
    pub(super) fn handle_host_lost(&mut self, host: HostId, why: &str) {
        self.fail_requests_to(host);
        if self.master.is_some() {
            self.log_warning(format!("{host} is lost: {why}"));
            self.stop_awaiting_host(host);
            self.notify_coordinators_of_lost_host(host);
            // Jobs that had tasks on the lost host roll back before the loss is announced.
            self.roll_back_for_lost_host(host);
            if self.shutdown.is_none() {
                self.remove_lost_host(host, why);
            }
        } else if host == HostId::MASTER {
            // During a shutdown the master ends in order, or waits for this host no longer.
            if self.shutdown.is_none() {
                let why = why.to_string();
                self.outputs.push_back(Output::MasterLost { why });
            }
            self.shut_down_now(&format!("the master is lost: {why}"));
        } else {
            self.log_warning(format!("the session with {host} broke: {why}"));
            self.retain_forwarded_items(host);
        }
    }
}
