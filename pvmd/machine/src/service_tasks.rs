//! Tasks that do a part of the daemon's work, by PVM's documented messages:
//!
//! - A tasker starts the tasks of its host (`pvm_reg_tasker`).
//! - A hoster starts daemons on other hosts (`pvm_reg_hoster`, master only).
//! - A tracer receives the output and the trace records that have no other destination
//!   (`pvm_reg_tracer`).
//!
//! When such a task ends, the daemon does the work itself again.
//!
//! In this module "tasker" means a task that has registered as a tasker; the daemon's own tasker is
//! reached by [`super::io::Output::ToTasker`].

use super::io::StartError;
use super::spawn::ExecJob;
use super::tasks::Task;
use super::{Machine, Output, StartId};
use crate::io::{HostPlan, HosterOrder};
use sempa_proto::host::HostMsg;
use sempa_proto::sm::{
    HosterStartRequest, SM_STHOST, SM_STTASK, TaskerStartRequest, pack_hoster_starts,
    pack_tasker_start, unpack_hoster_reply, unpack_task_exit,
};
use sempa_proto::table::{TASK_HOSTER, TASK_TASKER, TASK_TRACER};
use sempa_proto::task::{Reply, Service, Sink, TracerInfo, TracerSettings};
use sempa_proto::{PvmError, PvmResult, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Starts of daemons that were requested from a hoster in one message.
#[derive(Debug)]
struct HosterRequest {
    hoster: Tid,
    starts: BTreeMap<Tid, StartId>,
}

/// The tasks that work for this daemon.
#[derive(Debug, Default)]
pub(super) struct ServiceTasks {
    tasker: Option<Tid>,
    /// Taskers that have started tasks on this host. If a tasker ends, the tasks that it has
    /// started end, too.
    task_starters: BTreeSet<Tid>,
    hoster: Option<Tid>,
    hoster_requests: BTreeMap<i32, HosterRequest>,
    last_wid: i32,
    pub(super) tracer: Option<TracerInfo>,
}

impl ServiceTasks {
    fn slot(&mut self, service: Service) -> (&mut Option<Tid>, i32) {
        match service {
            Service::Hoster => (&mut self.hoster, TASK_HOSTER),
            Service::Tasker => (&mut self.tasker, TASK_TASKER),
        }
    }

    /// Returns the task that starts tasks on this host, if one is registered.
    pub(super) fn tasker(&self) -> Option<Tid> {
        self.tasker
    }
}

impl Machine {
    /// Registers a task for a service, or unregisters it if it is registered.
    pub(super) fn toggle_service(&mut self, tid: Tid, id: RequestId, service: Service) {
        if service == Service::Hoster && self.master.is_none() {
            let reason = "a hoster serves the master, so it must run on the master's host";
            return self.reply_error(tid, id, PvmError::HosterNotMaster, reason);
        }
        let (slot, flag) = self.service_tasks.slot(service);
        let registers = match *slot {
            Some(other) if other != tid => {
                let reason = format!("{other} provides this service already");
                return self.reply_error(tid, id, PvmError::Already, reason);
            }
            before => before.is_none(),
        };
        *slot = registers.then_some(tid);
        self.set_flag(tid, flag, registers);
        let change = if registers {
            "serves this daemon from now on"
        } else {
            "does not serve this daemon any more"
        };
        self.log_and_record(format!("{tid} {change} ({service:?})"));
        self.reply(tid, id, Reply::Serving(registers));
    }

    fn set_flag(&mut self, tid: Tid, flag: i32, on: bool) {
        if let Some(task) = self.tasks.get_mut(tid) {
            task.flags = if on {
                task.flags | flag
            } else {
                task.flags & !flag
            };
        }
    }

    /// Registers the tracer of the virtual machine, or unregisters it (master only).
    pub(super) fn toggle_tracer(&mut self, tid: Tid, id: RequestId, settings: TracerSettings) {
        let registers = match &self.service_tasks.tracer {
            Some(other) if other.tid != tid => {
                let reason = format!("{} is the tracer of this virtual machine", other.tid);
                return self.reply_error(tid, id, PvmError::Already, reason);
            }
            before => before.is_none(),
        };
        self.announce_tracer(registers.then_some(TracerInfo { tid, settings }));
        self.reply(tid, id, Reply::Serving(registers));
    }

    fn announce_tracer(&mut self, tracer: Option<TracerInfo>) {
        for host in self.other_hosts() {
            self.send_to_host(
                host,
                HostMsg::Tracer {
                    tracer: tracer.clone(),
                },
            );
        }
        self.set_tracer(tracer);
    }

    /// Notifies a host that joins of the tracer (master only).
    pub(super) fn send_tracer_to(&mut self, host: sempa_proto::HostId) {
        if self.master.is_some() && self.service_tasks.tracer.is_some() {
            let tracer = self.service_tasks.tracer.clone();
            self.send_to_host(host, HostMsg::Tracer { tracer });
        }
    }

    /// Sets the tracer of the virtual machine. Running tasks keep the destinations of their output
    /// and trace records.
    pub(super) fn set_tracer(&mut self, tracer: Option<TracerInfo>) {
        let before = std::mem::replace(&mut self.service_tasks.tracer, tracer);
        for (info, on) in [(before, false), (self.service_tasks.tracer.clone(), true)] {
            if let Some(info) = info {
                self.set_flag(info.tid, TASK_TRACER, on);
            }
        }
    }

    /// Directs output and trace records without a destination to the tracer.
    pub(super) fn apply_tracer_sinks(&self, output: &mut Sink, trace: &mut Sink) {
        let Some(tracer) = &self.service_tasks.tracer else {
            return;
        };
        if !output.tid.is_task() {
            *output = tracer.output_sink();
        }
        if !trace.tid.is_task() {
            *trace = tracer.trace_sink();
        }
    }

    /// Handles the end of a task that may have provided a service. This daemon provides the service
    /// itself again.
    pub(super) fn service_task_ended(&mut self, tid: Tid) {
        for service in [Service::Hoster, Service::Tasker] {
            let (slot, flag) = self.service_tasks.slot(service);
            if *slot == Some(tid) {
                *slot = None;
                self.set_flag(tid, flag, false);
                self.log_warning_and_record(format!(
                    "{tid} is gone; this daemon provides its service again ({service:?})"
                ));
            }
        }
        if self.service_tasks.task_starters.remove(&tid) {
            let started_tasks: Vec<Tid> = self
                .tasks
                .live
                .values()
                .filter(|t| t.tasker == Some(tid))
                .map(|t| t.tid)
                .collect();
            for task in started_tasks {
                self.end_task(task, 9, Default::default());
            }
        }
        let (lost, kept) = std::mem::take(&mut self.service_tasks.hoster_requests)
            .into_iter()
            .partition(|(_, o)| o.hoster == tid);
        let lost: BTreeMap<i32, HosterRequest> = lost;
        self.service_tasks.hoster_requests = kept;
        for start in lost
            .into_values()
            .flat_map(|orders| orders.starts.into_values())
        {
            self.start_without_hoster(start);
        }
        if self.master.is_some()
            && self
                .service_tasks
                .tracer
                .as_ref()
                .is_some_and(|t| t.tid == tid)
        {
            self.announce_tracer(None);
        }
    }

    /// Requests a tasker to start a task.
    pub(super) fn request_task_start(
        &mut self,
        tasker: Tid,
        task: &Task,
        order: TaskerStartRequest,
    ) {
        self.service_tasks.task_starters.insert(tasker);
        debug_assert_eq!(task.tasker, Some(tasker), "it ends with its tasker");
        self.send_daemon_message(tasker, 0, SM_STTASK, 0, pack_tasker_start(&order));
    }

    /// Returns the variables that a tasker must add to its own environment for a task.
    pub(super) fn tasker_environment(&self, job: &ExecJob, spawn_token: i32) -> Vec<Vec<u8>> {
        let mut env = vec![format!("PVMEPID={spawn_token}").into_bytes()];
        env.extend(
            job.request()
                .env
                .iter()
                .filter(|entry| !entry.starts_with(b"PVMEPID="))
                .cloned(),
        );
        env.extend(self.daemon_environment(job.request()));
        env
    }

    /// Handles a tasker's report that one of its tasks has ended.
    pub(super) fn handle_task_end_report(&mut self, src: Tid, body: bytes::Bytes) -> PvmResult<()> {
        let end = unpack_task_exit(body)?;
        match self.tasks.get(end.tid) {
            Some(task) if task.tasker == Some(src) => {
                self.handle_process_exit(end.tid, end.status, end.used)
            }
            Some(_) => self.log_warning(format!(
                "{src} reported the end of {}, which it has not started; dropped",
                end.tid
            )),
            // The task has disconnected before and counts as ended since.
            None => {}
        }
        Ok(())
    }

    /// Starts daemons on other hosts: by the hoster if one is registered, otherwise directly.
    pub(super) fn start_daemons(&mut self, plans: Vec<(StartId, HostPlan)>) {
        if self.service_tasks.hoster.is_some() && !plans.is_empty() {
            return self.outputs.push_back(Output::PrepareHosts { plans });
        }
        for (start, plan) in plans {
            self.start_daemon(start, plan);
        }
    }

    fn start_without_hoster(&mut self, start: StartId) {
        if let Some(plan) = self.plan_of_start(start) {
            self.start_daemon(start, plan);
        }
    }

    fn start_daemon(&mut self, start: StartId, plan: HostPlan) {
        match &plan.start_option {
            Some(option) if !plan.is_manual() => {
                let reason = format!(
                    "so={option} is for hosters, and there is none: this daemon starts others over ssh with keys (see \
                     PVM_RSH), or you start them by hand with so=ms"
                );
                self.handle_host_started(start, Err((PvmError::NotImpl, reason)));
            }
            _ => self.outputs.push_back(Output::StartHost { start, plan }),
        }
    }

    /// Sends prepared starts to the hoster. If the hoster has ended meanwhile, this daemon starts
    /// them itself.
    pub(super) fn send_starts_to_hoster(
        &mut self,
        orders: Vec<(StartId, Result<HosterOrder, StartError>)>,
    ) {
        let Some(hoster) = self.service_tasks.hoster else {
            return orders
                .into_iter()
                .for_each(|(start, _)| self.start_without_hoster(start));
        };
        let (mut list, mut starts) = (Vec::new(), BTreeMap::new());
        for (start, order) in orders {
            let Some(plan) = self.plan_of_start(start) else {
                continue;
            };
            match order {
                Ok(HosterOrder {
                    login,
                    command,
                    secret,
                }) => {
                    let (host, option) = (plan.id.tid(), plan.start_option.unwrap_or_default());
                    list.push(HosterStartRequest {
                        host,
                        option,
                        login,
                        command,
                        vmid: secret,
                    });
                    starts.insert(host, start);
                }
                Err(refused) => self.handle_host_started(start, Err(refused)),
            }
        }
        if !list.is_empty() {
            self.service_tasks.last_wid = self.service_tasks.last_wid.wrapping_add(1).max(1);
            let wid = self.service_tasks.last_wid;
            self.service_tasks
                .hoster_requests
                .insert(wid, HosterRequest { hoster, starts });
            self.send_daemon_message(hoster, 0, SM_STHOST, wid, pack_hoster_starts(&list));
        }
    }

    pub(super) fn handle_hoster_answer(
        &mut self,
        src: Tid,
        wid: i32,
        body: bytes::Bytes,
    ) -> PvmResult<()> {
        let answers = unpack_hoster_reply(body)?;
        let Some(orders) = self
            .service_tasks
            .hoster_requests
            .get_mut(&wid)
            .filter(|o| o.hoster == src)
        else {
            self.log_warning(format!(
                "{src} replied to an order to start daemons that was not sent to it; dropped"
            ));
            return Ok(());
        };
        let lines: Vec<(StartId, String)> = answers
            .into_iter()
            .filter_map(|(host, line)| Some((orders.starts.remove(&host)?, line)))
            .collect();
        if orders.starts.is_empty() {
            self.service_tasks.hoster_requests.remove(&wid);
        }
        for (start, line) in lines {
            self.outputs
                .push_back(Output::HosterReported { start, line });
        }
        Ok(())
    }
}
