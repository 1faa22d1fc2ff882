//! Carries out the outputs of the machines.

use super::strikes::Edge;
use super::{Channel, Happening, Sim, pair};
use crate::io::StartOrder;
use crate::{ConnId, Event, HostPlan, Output};
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::migration::Failure;
use sempa_proto::task::ToTask;
use sempa_proto::{HostId, Micros, MigrationId, PvmError};

impl Sim {
    pub(super) fn carry_out(&mut self, on: HostId, output: Output) {
        match output {
            Output::ToTask { conn, message } => {
                let late = self.faults.late_percent;
                if late > 0
                    && matches!(message, ToTask::Quiesce { .. })
                    && self.dice.below(100) < late
                {
                    let at = self.now + Micros(20_000 + self.dice.below(120_000));
                    self.channels.insert(Channel::ToProc(conn), at);
                }
                self.tell_proc(conn, |proc| Happening::ToProc(proc, conn, message));
            }
            Output::RouteToTask {
                conn,
                message,
                descriptors,
            } => {
                let ToTask::Route { message: word, .. } = &message else {
                    panic!("{message:?} brings descriptors")
                };
                assert_eq!(word.fd_count(), descriptors.count(), "{word:?}");
                self.tell_proc(conn, |proc| Happening::ToProc(proc, conn, message));
            }
            Output::LinkToTask { conn, frame } => {
                self.tell_proc(conn, |proc| Happening::LinkToProc(proc, conn, frame))
            }
            Output::HearOut { conn } => self.hear_out(conn),
            Output::CloseTask { conn } => self.tell_proc(conn, |_| Happening::CloseProc(conn)),
            Output::Signal { conn, signal } => {
                if let Some(p) = self.conns.get(&conn) {
                    self.signalled.push((*p, signal));
                }
            }
            Output::StartTasker => {}
            Output::ToTasker(message) => self.tell_tasker(on, message),
            Output::Log { text } => self.nodes.get_mut(&on).expect("it speaks").log.push(text),
            Output::LogTaskOutput { bytes, .. } => self
                .nodes
                .get_mut(&on)
                .expect("it speaks")
                .output
                .extend(&bytes),
            Output::Shutdown => {
                self.nodes.get_mut(&on).expect("it speaks").alive = false;
                self.lose_procs(on, |p| p.spawned.is_some());
                self.session_ends(on);
            }
            output => self.carry_out_for_hosts(on, output),
        }
    }

    /// Closes the stream of a process that has exited, even if another process holds its socket.
    fn hear_out(&mut self, conn: ConnId) {
        let proc = self.conns[&conn];
        assert!(
            self.procs[proc].exited,
            "only of who has ended is nothing lost (seed {})",
            self.seed
        );
        if self.procs[proc].conn == Some(conn) {
            self.close(proc);
        }
    }

    fn tell_proc(&mut self, conn: ConnId, happening: impl FnOnce(usize) -> Happening) {
        if let Some(proc) = self.conns.get(&conn).copied() {
            self.send(Channel::ToProc(conn), happening(proc));
        }
    }

    fn carry_out_for_hosts(&mut self, on: HostId, output: Output) {
        match output {
            Output::ToHost { host, message } => {
                let event = Event::HostControl {
                    host: on,
                    message: round_trip(&message),
                };
                self.between(Channel::Control(on, host), on, host, event);
            }
            Output::Carry { host, carried } => {
                let event = Event::HostCarried {
                    host: on,
                    carried: round_trip_carried(&carried),
                };
                self.between(Channel::Data(on, host), on, host, event);
            }
            Output::Connect { host, .. } => self.session(on, host),
            Output::Forget { host } => {
                if self.sessions.remove(&pair(on, host)) {
                    self.push(self.now + Micros(1000), Happening::LostSeen(host, on));
                }
            }
            Output::StartHost { start, plan } => self.start_host(start, plan),
            Output::PrepareHosts { plans } => {
                let order = |plan: &HostPlan| StartOrder {
                    login: plan.name.clone(),
                    command: format!("pvmd {}", plan.name),
                    secret: "secret".into(),
                };
                let orders = plans
                    .iter()
                    .map(|(start, plan)| (*start, Ok(order(plan))))
                    .collect();
                self.prepared.extend(plans);
                self.send(
                    Channel::Tasker(on),
                    Happening::Event(on, Event::HostsPrepared { orders }),
                );
            }
            Output::HosterHeard { start, line } => {
                let plan = self
                    .prepared
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
                    self.send(
                        Channel::Tasker(on),
                        Happening::Event(on, Event::HostStarted { start, result }),
                    );
                }
            }
            Output::AbandonStart { start } => self.abandoned.push(start),
            output => self.carry_out_moves(on, output),
        }
    }

    fn carry_out_moves(&mut self, on: HostId, output: Output) {
        match output {
            Output::SendAhead { migration, to } => self.send_ahead(on, migration, to),
            Output::SendImages { migration, to } => self.send_images(on, migration, to),
            Output::ExpectImages { migration, .. } | Output::ExpectCopy { migration, .. } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected
                    .insert(migration);
            }
            // How engines exchange memory is not simulated.
            Output::LendMemory { .. } | Output::ExpectMemory { .. } => {}
            Output::DropImages { migration } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected
                    .remove(&migration);
                self.sets.drop_images(on, migration);
            }
            Output::WriteToken { path, token } => {
                self.tokens.insert((on, path), token);
            }
            Output::RemoveToken { path } => {
                self.tokens.remove(&(on, path));
            }
            Output::RecordMove { migration, tid, to } => {
                let result = self.step_result(());
                if result.is_ok() {
                    self.recorded.push((migration, tid, to));
                }
                self.push(
                    self.now + Micros(500),
                    Happening::Event(on, Event::MoveRecorded { migration, result }),
                );
            }
            Output::StepBegins { step, .. } => self.reaches((step, Edge::Before)),
            Output::StepEnded { step, .. } => self.reaches((step, Edge::After)),
            output => self.store_gets(on, output),
        }
    }

    /// Pre-copied memory is lost now, or fails at the end like all other images.
    fn send_ahead(&mut self, on: HostId, migration: MigrationId, to: HostId) {
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
            self.push(self.now + Micros(900), Happening::Event(host, event));
        }
    }

    fn send_images(&mut self, on: HostId, migration: MigrationId, to: HostId) {
        let mut result = self.step_result(100);
        if self.strikes.is_one() && self.is_parted() {
            result = Err(Failure::Images("no session".into()));
        }
        let sent = result.clone();
        self.push(
            self.now + Micros(900),
            Happening::Event(
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
            .is_some_and(|n| n.alive && n.expected.contains(&migration));
        if expected {
            self.push(
                self.now + Micros(1000),
                Happening::Event(to, Event::ImagesReceived { migration, result }),
            );
        }
    }
}

/// Encodes and decodes a message, as its way over the network does.
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
