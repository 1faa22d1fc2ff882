//! Carries out the outputs of the machines.

use super::fault_injection::StepEdge;
use super::{Channel, Sim, SimEvent, pair};
use crate::io::HosterOrder;
use crate::{ConnId, Event, HostPlan, Output};
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::migration::Failure;
use sempa_proto::task::ToTask;
use sempa_proto::{HostId, Micros, MigrationId, PvmError};

impl Sim {
    pub(super) fn carry_out(&mut self, on: HostId, output: Output) {
        match output {
            Output::ToTask { conn, message } => {
                let late = self.random_faults.slow_quiesce_percent;
                if late > 0
                    && matches!(message, ToTask::Quiesce { .. })
                    && self.rng.below(100) < late
                {
                    let at = self.now + Micros(20_000 + self.rng.below(120_000));
                    self.channels.insert(Channel::ToProc(conn), at);
                }
                self.send_to_proc(conn, |proc| SimEvent::ToProc(proc, conn, message));
            }
            Output::ToTaskWithFds {
                conn,
                message,
                descriptors,
            } => {
                let ToTask::Route { message: word, .. } = &message else {
                    panic!("{message:?} brings descriptors")
                };
                assert_eq!(word.fd_count(), descriptors.count(), "{word:?}");
                self.send_to_proc(conn, |proc| SimEvent::ToProc(proc, conn, message));
            }
            Output::LinkToTask { conn, frame } => {
                self.send_to_proc(conn, |proc| SimEvent::LinkToProc(proc, conn, frame))
            }
            Output::DrainConnection { conn } => self.close_exited(conn),
            Output::CloseTask { conn } => self.send_to_proc(conn, |_| SimEvent::CloseProc(conn)),
            Output::Signal { conn, signal } => {
                if let Some(p) = self.conns.get(&conn) {
                    self.signalled.push((*p, signal));
                }
            }
            Output::StartTasker => {}
            Output::ToTasker(message) => self.send_to_tasker(on, message),
            Output::Log { text, .. } => self.nodes.get_mut(&on).expect("it speaks").log.push(text),
            Output::LogTaskOutput { bytes, .. } => self
                .nodes
                .get_mut(&on)
                .expect("it speaks")
                .output
                .extend(&bytes),
            Output::Shutdown => {
                self.nodes.get_mut(&on).expect("it speaks").is_alive = false;
                self.end_procs(on, |p| p.spawned_tid.is_some());
                self.end_sessions(on);
            }
            output => self.carry_out_for_hosts(on, output),
        }
    }

    /// Closes the stream of a process that has exited, even if another process holds its socket.
    fn close_exited(&mut self, conn: ConnId) {
        let proc = self.conns[&conn];
        assert!(
            self.procs[proc].exited,
            "only the stream of an exited process can be closed without loss (seed {})",
            self.seed
        );
        if self.procs[proc].conn == Some(conn) {
            self.close(proc);
        }
    }

    fn send_to_proc(&mut self, conn: ConnId, make_event: impl FnOnce(usize) -> SimEvent) {
        if let Some(proc) = self.conns.get(&conn).copied() {
            self.send_in_order(Channel::ToProc(conn), make_event(proc));
        }
    }

    fn carry_out_for_hosts(&mut self, on: HostId, output: Output) {
        match output {
            Output::ToHost { host, message } => {
                let event = Event::HostControl {
                    host: on,
                    message: round_trip(&message),
                };
                self.send_or_store(Channel::Control(on, host), on, host, event);
            }
            Output::SendData { host, message } => {
                let event = Event::HostData {
                    host: on,
                    message: round_trip_carried(&message),
                };
                self.send_or_store(Channel::Data(on, host), on, host, event);
            }
            Output::Connect { host, .. } => self.connect_hosts(on, host),
            Output::Disconnect { host } => {
                if self.sessions.remove(&pair(on, host)) {
                    self.schedule(self.now + Micros(1000), SimEvent::LossNoticed(host, on));
                }
            }
            Output::StartHost { start, plan } => self.start_host(start, plan),
            Output::PrepareHosts { plans } => {
                let hoster_order = |plan: &HostPlan| HosterOrder {
                    login: plan.name.clone(),
                    command: format!("pvmd {}", plan.name),
                    secret: "secret".into(),
                };
                let orders = plans
                    .iter()
                    .map(|(start, plan)| (*start, Ok(hoster_order(plan))))
                    .collect();
                self.prepared_starts.extend(plans);
                self.send_in_order(
                    Channel::Tasker(on),
                    SimEvent::Machine(on, Event::HostsPrepared { orders }),
                );
            }
            Output::HosterReported { start, line } => {
                let plan = self
                    .prepared_starts
                    .iter()
                    .find(|(known, _)| *known == start)
                    .map(|(_, plan)| plan.clone());
                if line.starts_with("ddpro") {
                    self.start_host(start, plan.expect("it was prepared"));
                } else {
                    let result = Err((
                        PvmError::from_name(&line).unwrap_or(PvmError::CantStart),
                        line,
                    ));
                    self.send_in_order(
                        Channel::Tasker(on),
                        SimEvent::Machine(on, Event::HostStarted { start, result }),
                    );
                }
            }
            Output::AbandonStart { start } => self.abandoned_starts.push(start),
            output => self.carry_out_for_migrations(on, output),
        }
    }

    fn carry_out_for_migrations(&mut self, on: HostId, output: Output) {
        match output {
            Output::SendImagesEarly { migration, to } => self.start_pre_copy(on, migration, to),
            Output::SendImages { migration, to } => self.send_images(on, migration, to),
            Output::ExpectImages { migration, .. } | Output::ExpectCopy { migration, .. } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected_images
                    .insert(migration);
            }
            // The exchange of memory between engines is not simulated.
            Output::ServeMemory { .. } | Output::FetchMemory { .. } => {}
            Output::DropImages { migration } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected_images
                    .remove(&migration);
                self.image_store.drop_images(on, migration);
            }
            Output::WriteToken { path, token } => {
                self.tokens.insert((on, path), token);
            }
            Output::RemoveToken { path } => {
                self.tokens.remove(&(on, path));
            }
            Output::RecordMigration { migration, tid, to } => {
                let result = self.step_result(());
                if result.is_ok() {
                    self.recorded_migrations.push((migration, tid, to));
                }
                self.schedule(
                    self.now + Micros(500),
                    SimEvent::Machine(on, Event::MigrationRecorded { migration, result }),
                );
            }
            Output::StepStarting { step, .. } => self.reach_point((step, StepEdge::Before)),
            Output::StepEnded { step, .. } => self.reach_point((step, StepEdge::After)),
            output => self.carry_out_for_store(on, output),
        }
    }

    /// Decides whether pre-copied memory is lost immediately. If not, it may still fail at the end
    /// like all other images.
    fn start_pre_copy(&mut self, on: HostId, migration: MigrationId, to: HostId) {
        let Err(why) = self.step_result(()) else {
            return;
        };
        for (host, event) in [
            (
                on,
                Event::ImagesSent {
                    migration,
                    result: Err(why.clone()),
                },
            ),
            (
                to,
                Event::ImagesReceived {
                    migration,
                    result: Err(why),
                },
            ),
        ] {
            self.schedule(self.now + Micros(900), SimEvent::Machine(host, event));
        }
    }

    fn send_images(&mut self, on: HostId, migration: MigrationId, to: HostId) {
        let mut result = self.step_result(100);
        if self.injection.is_active() && self.session_is_broken() {
            result = Err(Failure::Images("no session".into()));
        }
        let sent = result.clone();
        self.schedule(
            self.now + Micros(900),
            SimEvent::Machine(
                on,
                Event::ImagesSent {
                    migration,
                    result: sent,
                },
            ),
        );
        let expected = self
            .nodes
            .get(&to)
            .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
        if expected {
            self.schedule(
                self.now + Micros(1000),
                SimEvent::Machine(to, Event::ImagesReceived { migration, result }),
            );
        }
    }
}

/// Encodes and decodes a message, as its transfer over the network does.
fn round_trip(message: &HostMsg) -> HostMsg {
    let bytes = sempa_proto::frame::to_bytes(message).expect("it fits");
    sempa_proto::frame::from_bytes(&bytes).expect("it comes back")
}

fn round_trip_carried(carried: &DataMsg) -> DataMsg {
    if let DataMsg::Frame(bytes) = carried {
        return DataMsg::Frame(bytes.clone());
    }
    let bytes = sempa_proto::frame::to_bytes(carried).expect("it fits");
    sempa_proto::frame::from_bytes(&bytes).expect("it comes back")
}
