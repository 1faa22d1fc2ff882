//! Applies the inputs of a recording to the simulated virtual machine: the service receives them as
//! messages.

use super::{OpenSpawn, Spawner, WorldState, service_tid};
use crate::decide::{TimedSample, external_demand};
use crate::recording::RecordedInput;
use crate::replay::policy_file_text;
use crate::service::{TAG_LOAD, TAG_POLICY};
use sempa_proto::event::EventKind;
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
            // The service receives the new policy as after a change of the policy file.
            RecordedInput::Policy(policy) if self.policy_changes => {
                self.post(
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
            | RecordedInput::Started { .. }
            | RecordedInput::Ended { .. } => {}
            RecordedInput::Hosts(table) => self.set_hosts(table),
            RecordedInput::Report { report, own } => {
                let (host, at) = (report.host, self.now);
                let foreign = external_demand(&TimedSample {
                    sample: report.sample,
                    received_at: at,
                    own_tasks: own,
                });
                self.reports.insert(host, (report, foreign));
                self.send_report(host, self.guests(host));
            }
            // The service receives the request as it was recorded. Its answer is ignored.
            RecordedInput::Drain {
                host,
                by,
                begun,
                within,
            } => {
                let order = if begun {
                    RmQuery::Drain { host, within }
                } else {
                    RmQuery::Undrain { host }
                };
                if let Ok(body) = encode(&order) {
                    self.post(by, CTX_RM, TAG_QUERY, 0, DSIG_X86_64, body.into());
                }
            }
            RecordedInput::Spawn {
                number,
                caller,
                user,
                job,
                request,
            } => self.request_spawn(number, caller, (user, job), &request),
        }
    }

    /// Sends a recorded spawn to the service. The requesting task is the one of the replay that
    /// corresponds to the recorded one.
    fn request_spawn(
        &mut self,
        (recorded, wid): (Tid, i32),
        caller: HostId,
        (user, job): (u32, Tid),
        request: &SpawnRequest,
    ) {
        self.figures.spawns += 1;
        let src = self
            .replayed_tids
            .get(&recorded)
            .copied()
            .unwrap_or(recorded);
        if !self.tasks.contains_key(&src) && !self.spawners.contains_key(&src) {
            let parent = if job == src { Tid::NONE } else { job };
            self.spawners.insert(
                src,
                Spawner {
                    host: caller,
                    parent,
                    user,
                },
            );
            // The event contains no program name, because the task was not spawned.
            self.event(
                caller,
                EventKind::TaskStarted {
                    tid: src,
                    parent,
                    name: String::new(),
                    user,
                },
            );
        }
        self.asked_at.insert((src, wid), self.now);
        let work = self.work.remove(&(recorded, wid)).unwrap_or_default();
        self.open_spawns.push(OpenSpawn {
            number: (src, wid),
            file: request.file.clone(),
            work,
        });
        if let Some(tasks) = self.recorded_tasks.remove(&(recorded, wid)) {
            self.recorded_tasks.insert((src, wid), tasks);
        }
        self.post(
            src,
            CTX_BASE,
            SM_SPAWN,
            wid,
            ENC_XDR,
            pack_spawn(request, None),
        );
    }

    fn set_hosts(&mut self, table: HostTable) {
        let before = std::mem::replace(&mut self.table, table);
        let gone: Vec<&HostEntry> = before
            .hosts
            .iter()
            .filter(|host| self.table.get(host.id).is_none())
            .collect();
        for host in gone {
            let lost: Vec<Tid> = self
                .tasks
                .iter()
                .filter(|(_, t)| t.host == host.id)
                .map(|(tid, _)| *tid)
                .collect();
            self.figures.lost += lost.len() as u64;
            lost.iter().for_each(|tid| drop(self.tasks.remove(tid)));
            self.spawners.retain(|_, spawner| spawner.host != host.id);
            self.reports.remove(&host.id);
            self.watchers.remove(&host.id);
            let why = "as recorded".to_string();
            self.event(
                HostId::MASTER,
                EventKind::HostGone {
                    host: host.id,
                    name: host.name.clone(),
                    why,
                },
            );
        }
        for host in self
            .table
            .hosts
            .clone()
            .iter()
            .filter(|host| before.get(host.id).is_none())
        {
            self.event(
                HostId::MASTER,
                EventKind::HostAdded {
                    host: host.id,
                    name: host.name.clone(),
                },
            );
        }
    }

    /// Sends a report of a host's load watcher. Owner and external load are as recorded; the load
    /// of the tasks is that of the replay.
    pub(super) fn send_report(&mut self, host: HostId, guests: usize) {
        let Some(watcher) = self.watchers.get(&host).copied() else {
            return;
        };
        let own = guests as f32;
        let Some((report, foreign)) = self.reports.get(&host) else {
            return;
        };
        let mut report = report.clone();
        let (demand, cores) = (foreign + own, report.sample.processors());
        (report.sample.busy, report.sample.load1) = ((demand / cores).min(1.0), demand);
        (report.sample.running, report.sample.cpu_pressure) = (demand.round() as u32, 0.0);
        if let Ok(body) = to_bytes(&report) {
            self.post(watcher, CTX_RM, TAG_LOAD, 0, DSIG_X86_64, body.into());
        }
    }
}
