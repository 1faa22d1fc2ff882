//! Carries out the outputs of the simulated machines.

use super::fault_injection::StepEdge;
use super::{Channel, Sim, SimEvent, host_pair};
use crate::io::HosterOrder;
use crate::{ConnId, Event, HostPlan, Output};
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::migration::Failure;
use sempa_proto::task::ToTask;
use sempa_proto::vm_summary::VmSummary;
use sempa_proto::{HostId, Micros, MigrationId, PvmError};

/// The data that a host keeps for the case that the master is lost.
#[derive(Debug, Default)]
pub(in crate::tests) struct HostNote {
    /// The summary of the virtual machine on the host's disk.
    pub(in crate::tests) summary: Option<VmSummary>,
    /// Why the master is lost, if the daemon has reported that.
    pub(in crate::tests) master_loss: Option<String>,
}

impl Sim {
    pub(super) fn carry_out(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::SendToTask { conn, message } => {
                let slow_percent = self.random_faults.slow_quiesce_percent;
                if slow_percent > 0
                    && matches!(message, ToTask::Quiesce { .. })
                    && self.rng.below(100) < slow_percent
                {
                    let at = self.now + Micros(20_000 + self.rng.below(120_000));
                    self.last_arrivals.insert(Channel::ToProc(conn), at);
                }
                self.send_to_proc(conn, |proc| SimEvent::ToProc(proc, conn, message));
            }
            Output::SendToTaskWithFds {
                conn,
                message,
                descriptors,
            } => {
                let ToTask::Route {
                    message: route_message,
                    ..
                } = &message
                else {
                    panic!("{message:?} brings descriptors")
                };
                assert_eq!(
                    route_message.fd_count(),
                    descriptors.count(),
                    "{route_message:?}"
                );
                self.send_to_proc(conn, |proc| SimEvent::ToProc(proc, conn, message));
            }
            Output::SendFrameToTask { conn, frame } => {
                self.send_to_proc(conn, |proc| SimEvent::LinkToProc(proc, conn, frame))
            }
            Output::DrainConnection { conn } => self.close_exited_proc(conn),
            Output::CloseTask { conn } => self.send_to_proc(conn, |_| SimEvent::CloseProc(conn)),
            Output::SendSignal { conn, signal } => {
                if let Some(p) = self.procs_by_conn.get(&conn) {
                    self.sent_signals.push((*p, signal));
                }
            }
            Output::StartTasker => {}
            Output::SendToTasker(message) => self.send_to_tasker(host_id, message),
            Output::KillTasker { .. } => {
                if !self.nodes[&host_id].is_tasker_dead {
                    self.kill_tasker(host_id);
                }
            }
            Output::Log { text, .. } => self
                .nodes
                .get_mut(&host_id)
                .expect("it speaks")
                .log
                .push(text),
            Output::KeepSummary { summary } => {
                let node = self.nodes.get_mut(&host_id).expect("it speaks");
                node.note.summary = Some(*summary);
            }
            Output::MasterLost { why } => {
                let node = self.nodes.get_mut(&host_id).expect("it speaks");
                node.note.master_loss = Some(why);
            }
            Output::LogTaskOutput { bytes, .. } => self
                .nodes
                .get_mut(&host_id)
                .expect("it speaks")
                .task_output
                .extend(&bytes),
            Output::Shutdown => {
                self.nodes.get_mut(&host_id).expect("it speaks").is_alive = false;
                self.end_procs(host_id, |p| p.spawned_tid.is_some());
                self.end_sessions(host_id);
            }
            output => self.carry_out_for_hosts(host_id, output),
        }
    }

    /// Closes the connection of a process that has exited, even if a child process holds the socket
    /// open.
    fn close_exited_proc(&mut self, conn: ConnId) {
        let proc = self.procs_by_conn[&conn];
        assert!(
            self.procs[proc].exited,
            "only the stream of an exited process can be closed without loss (seed {})",
            self.seed
        );
        if self.procs[proc].conn == Some(conn) {
            self.close_connection(proc);
        }
    }

    fn send_to_proc(&mut self, conn: ConnId, make_event: impl FnOnce(usize) -> SimEvent) {
        if let Some(proc) = self.procs_by_conn.get(&conn).copied() {
            self.send_in_order(Channel::ToProc(conn), make_event(proc));
        }
    }

    fn carry_out_for_hosts(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::SendToHost { host, message } => {
                let event = Event::HostControl {
                    host: host_id,
                    message: encode_and_decode(&message),
                };
                self.send_or_store(Channel::Control(host_id, host), host_id, host, event);
            }
            Output::SendData { host, message } => {
                let event = Event::HostData {
                    host: host_id,
                    message: encode_and_decode_data(&message),
                };
                self.send_or_store(Channel::Data(host_id, host), host_id, host, event);
            }
            Output::Connect { host, .. } => self.connect_hosts(host_id, host),
            Output::Disconnect { host } => {
                if self.sessions.remove(&host_pair(host_id, host)) {
                    self.schedule(
                        self.now + Micros(1000),
                        SimEvent::LossDetected(host, host_id),
                    );
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
                    Channel::Tasker(host_id),
                    SimEvent::Machine(host_id, Event::HostsPrepared { orders }),
                );
            }
            Output::HosterReported { start, line } => {
                let plan = self
                    .prepared_starts
                    .iter()
                    .find(|(prepared_start, _)| *prepared_start == start)
                    .map(|(_, plan)| plan.clone());
                if line.starts_with("ddpro") {
                    self.start_host(start, plan.expect("it was prepared"));
                } else {
                    let result = Err((
                        PvmError::from_name(&line).unwrap_or(PvmError::CantStart),
                        line,
                    ));
                    self.send_in_order(
                        Channel::Tasker(host_id),
                        SimEvent::Machine(host_id, Event::HostStarted { start, result }),
                    );
                }
            }
            Output::AbandonStart { start } => self.abandoned_starts.push(start),
            output => self.carry_out_for_migrations(host_id, output),
        }
    }

    fn carry_out_for_migrations(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::SendImagesEarly { migration, target } => {
                self.start_pre_copy(host_id, migration, target)
            }
            Output::SendImages { migration, target } => {
                self.send_images(host_id, migration, target)
            }
            Output::ExpectImages { migration, .. } | Output::ExpectCopy { migration, .. } => {
                self.nodes
                    .get_mut(&host_id)
                    .expect("it speaks")
                    .expected_images
                    .insert(migration);
            }
            // The transfer of memory between engines is not simulated.
            Output::ServeMemory { .. } | Output::FetchMemory { .. } => {}
            Output::DropImages { migration } => {
                self.nodes
                    .get_mut(&host_id)
                    .expect("it speaks")
                    .expected_images
                    .remove(&migration);
                self.image_store.drop_images(host_id, migration);
            }
            Output::WriteToken { path, token } => {
                self.resume_tokens.insert((host_id, path), token);
            }
            Output::RemoveToken { path } => {
                self.resume_tokens.remove(&(host_id, path));
            }
            Output::RecordMigration {
                migration,
                tid,
                target,
            } => {
                let result = self.random_step_result(());
                if result.is_ok() {
                    self.recorded_migrations.push((migration, tid, target));
                }
                self.schedule(
                    self.now + Micros(500),
                    SimEvent::Machine(host_id, Event::MigrationRecorded { migration, result }),
                );
            }
            Output::StepStarting { step, .. } => self.reach_point((step, StepEdge::Start)),
            Output::StepEnded { step, .. } => self.reach_point((step, StepEdge::End)),
            output => self.carry_out_for_store(host_id, output),
        }
    }

    /// Decides at random whether the transfer of pre-copied memory fails immediately. A transfer
    /// that does not fail immediately may still fail at its end.
    fn start_pre_copy(&mut self, host_id: HostId, migration: MigrationId, target: HostId) {
        let Err(why) = self.random_step_result(()) else {
            return;
        };
        for (host, event) in [
            (
                host_id,
                Event::ImagesSent {
                    migration,
                    result: Err(why.clone()),
                },
            ),
            (
                target,
                Event::ImagesReceived {
                    migration,
                    result: Err(why),
                },
            ),
        ] {
            self.schedule(self.now + Micros(900), SimEvent::Machine(host, event));
        }
    }

    fn send_images(&mut self, host_id: HostId, migration: MigrationId, target: HostId) {
        let mut result = self.random_step_result(100);
        if self.injection.is_active() && self.session_is_broken() {
            result = Err(Failure::Images("no session".into()));
        }
        let source_result = result.clone();
        self.schedule(
            self.now + Micros(900),
            SimEvent::Machine(
                host_id,
                Event::ImagesSent {
                    migration,
                    result: source_result,
                },
            ),
        );
        let is_expected = self
            .nodes
            .get(&target)
            .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
        if is_expected {
            self.schedule(
                self.now + Micros(1000),
                SimEvent::Machine(target, Event::ImagesReceived { migration, result }),
            );
        }
    }
}

/// Encodes and decodes a message, as its transfer over the network does.
fn encode_and_decode(message: &HostMsg) -> HostMsg {
    let bytes = sempa_proto::frame::to_bytes(message).expect("it fits");
    sempa_proto::frame::from_bytes(&bytes).expect("it comes back")
}

fn encode_and_decode_data(message: &DataMsg) -> DataMsg {
    if let DataMsg::Frame(bytes) = message {
        return DataMsg::Frame(bytes.clone());
    }
    let bytes = sempa_proto::frame::to_bytes(message).expect("it fits");
    sempa_proto::frame::from_bytes(&bytes).expect("it comes back")
}
