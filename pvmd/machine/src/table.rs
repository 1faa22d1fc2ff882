//! Every daemon's part in changes of the host table, and dispatch of messages from other daemons.
//!
//! The master changes the table in two phases: it sends the new table to all hosts, and puts it
//! into force when all have prepared it. Each order has an epoch; older orders are refused. When a
//! table comes into force, the daemon connects to new hosts and handles the loss of removed ones.

use super::{Machine, Output};
use sempa_proto::host::{HostMsg, Location};
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::RmInfo;
use sempa_proto::{Epoch, HostId, Tid};

impl Machine {
    /// Handles a control message of another daemon. Orders are accepted only from the master.
    pub(super) fn host_control(&mut self, host: HostId, message: HostMsg) {
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
            | HostMsg::MigrationOrder { .. } => {
                if host == HostId::MASTER {
                    self.master_orders(message);
                } else {
                    self.log(format!(
                        "{host} gave an order that only the master gives; it was ignored"
                    ));
                }
            }
            HostMsg::TablePrepared { epoch } => self.change_heard(host, epoch, false),
            HostMsg::TableCommitted { epoch } => self.change_heard(host, epoch, true),
            HostMsg::TaskLocationAck { tid, epoch } => self.located_heard(host, tid, epoch),
            HostMsg::Leaving { why } => self.host_leaving(host, &why),
            HostMsg::TaskRequest {
                tid,
                id,
                request: what,
            } if self.master.is_some() => self.master_request(tid, id, what),
            HostMsg::TaskRequest { tid, .. } => {
                self.log(format!(
                    "{host} sent a request of {tid} for the master here; it was dropped"
                ));
            }
            HostMsg::HostRequest {
                id,
                request: question,
            } => self.question(super::asks::Back { host, id }, question),
            HostMsg::HostReply { id, reply: answer } => self.answered(host, id, answer),
            HostMsg::Message(message) => self.daemon_message(message),
            HostMsg::Event { at, kind } => self.append_event(host, at, kind),
            HostMsg::TaskOutput { tid, bytes } if self.master.is_some() => {
                self.log_output(tid, bytes)
            }
            HostMsg::TaskOutput { .. } => {}
            HostMsg::TaskLeft { tid } => self.task_left(tid),
            HostMsg::StepReport { migration, report } => {
                self.move_reported(host, migration, report)
            }
            HostMsg::SuspendMigrating {
                migration,
                id,
                order,
            } => self.coordinate_suspend(host, migration, id, &order),
            HostMsg::CopyStored {
                migration,
                checkpoint: set,
                result,
            } => self.copy_kept(host, migration, set, result),
            HostMsg::EndSignalSent { tid, signal } => self.told_to_end(tid, signal),
        }
    }

    fn master_orders(&mut self, message: HostMsg) {
        match message {
            HostMsg::PrepareTable {
                table,
                locations,
                rm,
                reserved_ids_max: spared,
            } => self.prepare(table, locations, rm, spared),
            HostMsg::CommitTable { epoch } => self.commit(epoch),
            HostMsg::TaskLocation(location) => self.located_order(location),
            HostMsg::Halt { why } => self.end_by_order(&why),
            HostMsg::Shutdown => self.shut_down("the master says so"),
            HostMsg::DropCopies { checkpoints: sets } => {
                self.out.push_back(Output::DropSets { sets })
            }
            HostMsg::Rm { rm } => self.set_wide_rm(rm),
            HostMsg::Tracer { tracer } => self.set_tracer(tracer),
            HostMsg::EndTasks { except } => self.end_tasks(&except),
            HostMsg::MigrationOrder { migration, order } => self.move_order(migration, order),
            HostMsg::SuspendDecided {
                migration,
                id,
                suspensions: suspended,
            } => self.suspend_decided(migration, id, suspended),
            _ => {}
        }
    }

    /// True if the order is newer than all earlier ones. An older one is refused.
    fn is_news(&mut self, epoch: Epoch, what: &str) -> bool {
        if epoch > self.epoch {
            self.epoch = epoch;
            return true;
        }
        self.log(format!(
            "{what} of epoch {epoch} is older than {}; it was refused",
            self.epoch
        ));
        false
    }

    fn prepare(
        &mut self,
        table: HostTable,
        locations: Vec<Location>,
        rm: Option<RmInfo>,
        spared: u32,
    ) {
        let epoch = table.epoch;
        if !self.is_news(epoch, "a host table") {
            return;
        }
        self.tasks.spare(spared);
        for location in locations {
            if location.tid.birth_host() == Some(self.config.host) {
                self.tasks.spare(location.tid.local_part());
            }
            self.locations.set(location);
        }
        self.set_wide_rm(rm);
        self.prepared = Some(table);
        self.tell_host(HostId::MASTER, HostMsg::TablePrepared { epoch });
    }

    fn commit(&mut self, epoch: Epoch) {
        match self.prepared.take_if(|table| table.epoch == epoch) {
            Some(table) => {
                self.apply_table(table);
                self.tell_host(HostId::MASTER, HostMsg::TableCommitted { epoch });
            }
            None => self.log(format!(
                "the host table of epoch {epoch} was not prepared here; it was refused"
            )),
        }
    }

    /// Puts a table into force.
    pub(super) fn apply_table(&mut self, table: HostTable) {
        let old = std::mem::replace(&mut self.table, table);
        let gone: Vec<HostId> = old
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| self.table.get(*id).is_none())
            .collect();
        let new: Vec<HostEntry> = self
            .table
            .hosts
            .iter()
            .filter(|h| old.get(h.id).is_none())
            .cloned()
            .collect();
        for host in gone {
            self.host_gone(host);
        }
        let joined = old.hosts.is_empty();
        for entry in &new {
            // Of two daemons, the one with the higher index connects. The session with the master
            // exists already.
            if entry.id < self.config.host && entry.id != HostId::MASTER {
                let addresses = entry.addresses.clone();
                self.out.push_back(Output::Connect {
                    host: entry.id,
                    addresses,
                });
            }
        }
        if joined {
            self.out.push_back(Output::StartTasker);
            self.start_commands();
        }
        let added: Vec<HostId> = new.iter().map(|h| h.id).collect();
        if !joined && !added.is_empty() {
            self.notify_hosts_added(&added);
        }
    }

    /// A host was removed from the table: its tasks count as dead.
    fn host_gone(&mut self, host: HostId) {
        if self.master.is_none() {
            self.out.push_back(Output::Forget { host });
        }
        self.notify_host_gone(host);
        self.rm_host_gone(host);
        self.fail_asks(host);
        self.moves_host_gone(host);
        if let Some(master) = &self.master {
            let mut concerned = master.mailbox.concerned();
            concerned.extend(master.events.followers());
            concerned.extend(master.groups.members());
            concerned.sort_unstable();
            concerned.dedup();
            let dead: Vec<Tid> = concerned
                .into_iter()
                .filter(|tid| self.location(*tid) == Some(host))
                .collect();
            for tid in dead {
                self.task_left(tid);
            }
        }
    }

    /// The session with a host has ended, or the host was silent for the duration of the lease.
    pub(super) fn host_lost(&mut self, host: HostId, why: &str) {
        self.fail_asks(host);
        if self.master.is_some() {
            self.log(format!("{host} is lost: {why}"));
            self.lost_while_stopping(host);
            self.coordinator_lost(host);
            // The remaining tasks of its jobs are ended before the loss is announced.
            self.jobs_lost_host(host);
            if self.stop.is_none() {
                self.host_out(host, why);
            }
        } else if host == HostId::MASTER {
            self.shut_down(&format!("the master is lost: {why}"));
        } else {
            self.log(format!("the session with {host} broke: {why}"));
            self.handing_broke(host);
        }
    }
}
