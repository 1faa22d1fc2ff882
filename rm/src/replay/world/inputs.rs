//! Applies the inputs of a recording to the simulated virtual machine. The service receives the
//! inputs as messages.

use super::{OpenSpawn, Spawner, WorldState, service_tid};
use crate::decide::{TimedSample, external_demand};
use crate::recording::RecordedInput;
use crate::replay::policy_file_text;
use crate::service::{TAG_LOAD_REPORT, TAG_POLICY};
use sempa_proto::event::{EventKind, LostTasks};
use sempa_proto::frame::to_bytes;
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::rm::{CTX_RM, RmQuery, TAG_QUERY, encode};
use sempa_proto::sm::{SM_SPAWN, pack_spawn};
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Tid};

impl WorldState {
    pub(super) fn apply_input(&mut self, input: RecordedInput) {
        match input {
            // The service receives the new policy like a change of the policy file.
            RecordedInput::Policy(policy) if self.replays_policy_changes => {
                self.post_message(
                    service_tid(),
                    CTX_RM,
                    TAG_POLICY,
                    0,
                    DSIG_X86_64,
                    policy_file_text(&policy).into(),
                );
            }
            RecordedInput::Policy(_)
            | RecordedInput::Labels(_)
            | RecordedInput::SpawnAnswered { .. }
            | RecordedInput::TaskEnded { .. } => {}
            RecordedInput::Hosts(table) => self.set_hosts(table),
            RecordedInput::Report {
                report,
                vm_task_count: task_count,
            } => {
                let (host, received_time) = (report.host, self.now);
                let external_threads = external_demand(&TimedSample {
                    sample: report.sample,
                    received_at: received_time,
                    vm_task_count: task_count,
                });
                self.reports.insert(host, (report, external_threads));
                self.send_report(host, self.computing_task_count(host));
            }
            // The service receives the drain request as it was recorded. The service's reply is
            // ignored.
            RecordedInput::Drain {
                host,
                requester,
                is_start,
                time_until_deadline,
            } => {
                let order = if is_start {
                    RmQuery::Drain {
                        host,
                        time_limit: time_until_deadline,
                    }
                } else {
                    RmQuery::Undrain { host }
                };
                if let Ok(body) = encode(&order) {
                    self.post_message(requester, CTX_RM, TAG_QUERY, 0, DSIG_X86_64, body.into());
                }
            }
            RecordedInput::Spawn {
                request_id,
                caller_host: caller,
                user,
                job,
                request,
            } => self.request_spawn(request_id, caller, (user, job), &request),
        }
    }

    /// Sends a recorded spawn to the service. `recorded_tid`: the requesting task in the recording.
    /// The corresponding task of the replay sends the request.
    fn request_spawn(
        &mut self,
        (recorded_tid, wid): (Tid, i32),
        caller: HostId,
        (user, job): (u32, Tid),
        request: &SpawnRequest,
    ) {
        self.result_so_far.spawns += 1;
        let requester = self
            .replayed_tids
            .get(&recorded_tid)
            .copied()
            .unwrap_or(recorded_tid);
        if !self.tasks.contains_key(&requester) && !self.spawners.contains_key(&requester) {
            let parent = if job == requester { Tid::NONE } else { job };
            self.spawners.insert(
                requester,
                Spawner {
                    host: caller,
                    parent,
                    user,
                },
            );
            // The event contains no program name, because the requesting task was not spawned.
            self.post_event(
                caller,
                EventKind::TaskStarted {
                    tid: requester,
                    parent,
                    name: String::new(),
                    user,
                },
            );
        }
        self.requested_at.insert((requester, wid), self.now);
        let work = self
            .recorded_task_work
            .remove(&(recorded_tid, wid))
            .unwrap_or_default();
        self.open_spawns.push(OpenSpawn {
            request_id: (requester, wid),
            program: request.program.clone(),
            task_work: work,
        });
        if let Some(tasks) = self.recorded_tasks.remove(&(recorded_tid, wid)) {
            self.recorded_tasks.insert((requester, wid), tasks);
        }
        self.post_message(
            requester,
            CTX_BASE,
            SM_SPAWN,
            wid,
            ENC_XDR,
            pack_spawn(request, None),
        );
    }

    fn set_hosts(&mut self, table: HostTable) {
        let previous_table = std::mem::replace(&mut self.host_table, table);
        let removed_hosts: Vec<&HostEntry> = previous_table
            .hosts
            .iter()
            .filter(|host| self.host_table.get(host.id).is_none())
            .collect();
        for host in removed_hosts {
            let lost_tids: Vec<Tid> = self
                .tasks
                .iter()
                .filter(|(_, t)| t.host == host.id)
                .map(|(tid, _)| *tid)
                .collect();
            self.result_so_far.lost += lost_tids.len() as u64;
            lost_tids
                .iter()
                .for_each(|tid| drop(self.tasks.remove(tid)));
            self.spawners.retain(|_, spawner| spawner.host != host.id);
            self.reports.remove(&host.id);
            self.watchers.remove(&host.id);
            let why = "as recorded".to_string();
            self.post_event(
                HostId::MASTER,
                EventKind::HostGone {
                    host: host.id,
                    name: host.name.clone(),
                    why,
                    lost_tasks: LostTasks::default(),
                },
            );
        }
        for host in self
            .host_table
            .hosts
            .clone()
            .iter()
            .filter(|host| previous_table.get(host.id).is_none())
        {
            self.post_event(
                HostId::MASTER,
                EventKind::HostAdded {
                    host: host.id,
                    name: host.name.clone(),
                },
            );
        }
    }

    /// Sends a report of a host's load watcher. Owner and external load are as recorded. The load
    /// of the tasks is that of the replay: one thread for each of the `guest_count` computing
    /// tasks.
    pub(super) fn send_report(&mut self, host: HostId, guest_count: usize) {
        let Some(watcher) = self.watchers.get(&host).copied() else {
            return;
        };
        let guest_threads = guest_count as f32;
        let Some((report, external_threads)) = self.reports.get(&host) else {
            return;
        };
        let mut report = report.clone();
        let (demand, cores) = (
            external_threads + guest_threads,
            report.sample.usable_processors(),
        );
        (report.sample.busy_share, report.sample.one_minute_load) =
            ((demand / cores).min(1.0), demand);
        (report.sample.runnable_threads, report.sample.cpu_pressure) = (demand.round() as u32, 0.0);
        if let Ok(body) = to_bytes(&report) {
            self.post_message(
                watcher,
                CTX_RM,
                TAG_LOAD_REPORT,
                0,
                DSIG_X86_64,
                body.into(),
            );
        }
    }
}
