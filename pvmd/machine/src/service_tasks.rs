//! Tasks that serve this daemon by PVM's documented messages:
//!
//! - A tasker starts the tasks of its host (`pvm_reg_tasker`).
//! - A hoster starts daemons on other hosts (`pvm_reg_hoster`, master only).
//! - A tracer receives the output and the trace records that have no other destination
//!   (`pvm_reg_tracer`).
//!
//! When a tasker or hoster ends, the daemon provides the service itself again.
//!
//! In this module "tasker" means a task that has registered as a tasker; the daemon's own tasker is
//! reached by [`super::io::Output::SendToTasker`].

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

/// The tasks that provide services for this daemon.
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
    fn registration(&mut self, service: Service) -> (&mut Option<Tid>, i32) {
        match service {
            Service::Hoster => (&mut self.hoster, TASK_HOSTER),
            Service::Tasker => (&mut self.tasker, TASK_TASKER),
        }
    }

    /// Returns the task that is registered as the tasker of this host; `None` if there is none.
    pub(super) fn tasker(&self) -> Option<Tid> {
        self.tasker
    }
}

impl Machine {
    /// Registers a task for a service. If the task is already registered, unregisters it.
    pub(super) fn toggle_service(&mut self, tid: Tid, id: RequestId, service: Service) {
        if service == Service::Hoster && self.master.is_none() {
            let reason = "a hoster serves the master, so it must run on the master's host";
            return self.reply_error(tid, id, PvmError::HosterNotMaster, reason);
        }
        let (registered_task, flag) = self.service_tasks.registration(service);
        let is_registered = match *registered_task {
            Some(other_task) if other_task != tid => {
                let reason = format!("{other_task} provides this service already");
                return self.reply_error(tid, id, PvmError::Already, reason);
            }
            previous_task => previous_task.is_none(),
        };
        *registered_task = is_registered.then_some(tid);
        self.set_task_flag(tid, flag, is_registered);
        let change = if is_registered {
            "serves this daemon from now on"
        } else {
            "does not serve this daemon any more"
        };
        self.log_and_record(format!("{tid} {change} ({service:?})"));
        self.reply(tid, id, Reply::Serving(is_registered));
    }

    fn set_task_flag(&mut self, tid: Tid, flag: i32, is_set: bool) {
        if let Some(task) = self.tasks.get_mut(tid) {
            task.flags = if is_set {
                task.flags | flag
            } else {
                task.flags & !flag
            };
        }
    }

    /// Registers a task as the tracer of the virtual machine (master only). If the task is already
    /// the tracer, unregisters it.
    pub(super) fn toggle_tracer(&mut self, tid: Tid, id: RequestId, settings: TracerSettings) {
        let is_registered = match &self.service_tasks.tracer {
            Some(other_tracer) if other_tracer.tid != tid => {
                let reason = format!("{} is the tracer of this virtual machine", other_tracer.tid);
                return self.reply_error(tid, id, PvmError::Already, reason);
            }
            previous_tracer => previous_tracer.is_none(),
        };
        self.announce_tracer(is_registered.then_some(TracerInfo { tid, settings }));
        self.reply(tid, id, Reply::Serving(is_registered));
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

    /// Sends the tracer to a host that has connected, if there is a tracer (master only).
    pub(super) fn send_tracer_to(&mut self, host: sempa_proto::HostId) {
        if self.master.is_some() && self.service_tasks.tracer.is_some() {
            let tracer = self.service_tasks.tracer.clone();
            self.send_to_host(host, HostMsg::Tracer { tracer });
        }
    }

    /// Sets the tracer of the virtual machine. Running tasks keep the destinations of their output
    /// and trace records.
    pub(super) fn set_tracer(&mut self, tracer: Option<TracerInfo>) {
        let old_tracer = std::mem::replace(&mut self.service_tasks.tracer, tracer);
        for (tracer_info, is_tracer) in [
            (old_tracer, false),
            (self.service_tasks.tracer.clone(), true),
        ] {
            if let Some(tracer_info) = tracer_info {
                self.set_task_flag(tracer_info.tid, TASK_TRACER, is_tracer);
            }
        }
    }

    /// Sets the tracer as the destination of output and of trace records that have no destination.
    pub(super) fn apply_tracer_sinks(&self, output_sink: &mut Sink, trace_sink: &mut Sink) {
        let Some(tracer) = &self.service_tasks.tracer else {
            return;
        };
        if !output_sink.tid.is_task() {
            *output_sink = tracer.output_sink();
        }
        if !trace_sink.tid.is_task() {
            *trace_sink = tracer.trace_sink();
        }
    }

    /// Handles the end of a task that may have provided a service. The tasks that a tasker has
    /// started end with the tasker. This daemon provides the services of a hoster or tasker itself
    /// again. The end of the tracer is announced to all hosts.
    pub(super) fn handle_service_task_end(&mut self, tid: Tid) {
        for service in [Service::Hoster, Service::Tasker] {
            let (registered_task, flag) = self.service_tasks.registration(service);
            if *registered_task == Some(tid) {
                *registered_task = None;
                self.set_task_flag(tid, flag, false);
                self.log_warning_and_record(format!(
                    "{tid} is gone; this daemon provides its service again ({service:?})"
                ));
            }
        }
        if self.service_tasks.task_starters.remove(&tid) {
            let started_tasks: Vec<Tid> = self
                .tasks
                .live_tasks
                .values()
                .filter(|t| t.tasker == Some(tid))
                .map(|t| t.tid)
                .collect();
            for task in started_tasks {
                self.end_task(task, 9, Default::default());
            }
        }
        let (lost_requests, remaining_requests) =
            std::mem::take(&mut self.service_tasks.hoster_requests)
                .into_iter()
                .partition(|(_, o)| o.hoster == tid);
        let lost_requests: BTreeMap<i32, HosterRequest> = lost_requests;
        self.service_tasks.hoster_requests = remaining_requests;
        for start in lost_requests
            .into_values()
            .flat_map(|hoster_request| hoster_request.starts.into_values())
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

    /// Returns the variables that a tasker must add to its own environment when it starts a task.
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
        let task_exit = unpack_task_exit(body)?;
        match self.tasks.get(task_exit.tid) {
            Some(task) if task.tasker == Some(src) => {
                self.handle_process_exit(task_exit.tid, task_exit.status, task_exit.usage)
            }
            Some(_) => self.log_warning(format!(
                "{src} reported the end of {}, which it has not started; dropped",
                task_exit.tid
            )),
            // The task has already disconnected and counts as ended.
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

    /// Sends prepared starts to the hoster. If the hoster has ended in the meantime, this daemon
    /// performs the starts itself.
    pub(super) fn send_starts_to_hoster(
        &mut self,
        orders: Vec<(StartId, Result<HosterOrder, StartError>)>,
    ) {
        let Some(hoster) = self.service_tasks.hoster else {
            return orders
                .into_iter()
                .for_each(|(start, _)| self.start_without_hoster(start));
        };
        let (mut start_requests, mut starts) = (Vec::new(), BTreeMap::new());
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
                    start_requests.push(HosterStartRequest {
                        host_tid: host,
                        so_option: option,
                        login,
                        command,
                        vmid: secret,
                    });
                    starts.insert(host, start);
                }
                Err(start_error) => self.handle_host_started(start, Err(start_error)),
            }
        }
        if !start_requests.is_empty() {
            self.service_tasks.last_wid = self.service_tasks.last_wid.wrapping_add(1).max(1);
            let wid = self.service_tasks.last_wid;
            self.service_tasks
                .hoster_requests
                .insert(wid, HosterRequest { hoster, starts });
            self.send_daemon_message(
                hoster,
                0,
                SM_STHOST,
                wid,
                pack_hoster_starts(&start_requests),
            );
        }
    }

    pub(super) fn handle_hoster_reply(
        &mut self,
        src: Tid,
        wid: i32,
        body: bytes::Bytes,
    ) -> PvmResult<()> {
        let host_replies = unpack_hoster_reply(body)?;
        let Some(hoster_request) = self
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
        let lines: Vec<(StartId, String)> = host_replies
            .into_iter()
            .filter_map(|(host, line)| Some((hoster_request.starts.remove(&host)?, line)))
            .collect();
        if hoster_request.starts.is_empty() {
            self.service_tasks.hoster_requests.remove(&wid);
        }
        for (start, line) in lines {
            self.outputs
                .push_back(Output::HosterReported { start, line });
        }
        Ok(())
    }
}
