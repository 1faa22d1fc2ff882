//! Client of the resource manager: requests that a resource manager may serve in place of the
//! daemon (`SM_*` messages).
//!
//! A request is sent to the resource manager if a resource manager is registered for this kind of
//! request, otherwise to the daemon. If the resource manager dies before it answers, the daemon
//! serves the request. The exception is a spawn request that was waiting for a free slot: the
//! request is sent to the next resource manager.

use crate::error::Error;
use crate::runtime::{Core, Runtime};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::message::{CTX_BASE, ENC_XDR, Message};
use sempa_proto::sm::{
    SM_ADDHOST, SM_CONFIG, SM_DELHOST, SM_NOTIFY, SM_SCHED, SM_SPAWN, SM_TASK, pack_spawn,
    unpack_tids,
};
use sempa_proto::table::{AddedHost, HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    NotifyRequest, NotifySubjects, Reply, Request, RmInfo, RmServices, SpawnRequest,
};
use sempa_proto::{Epoch, HostId, Micros, PvmError, PvmResult, Tid};
use std::time::{Duration, Instant};

pub const NOTIFY_TASK_EXIT: i32 = 1;
pub const NOTIFY_HOST_DELETE: i32 = 2;
pub const NOTIFY_HOST_ADD: i32 = 3;
/// `PvmNotifyCancel`: flag that cancels the notification. The flag is added to one of the three
/// constants above.
pub const NOTIFY_CANCEL: i32 = 256;

enum RmOutcome {
    Answer(Bytes),
    /// No resource manager serves the request, or the resource manager died before it answered. The
    /// request must be sent to the daemon.
    UseDaemon,
    /// The resource manager `dead_rm` died while the request waited for a free slot, since the time
    /// `waiting_since`. No task was started, so the request can be sent to the next resource
    /// manager.
    RetryWithNextRm {
        dead_rm: Tid,
        waiting_since: Micros,
    },
}

/// The resource manager to which a request will be sent, and the numbers that identify its answer.
struct RmCallTarget {
    rm: Tid,
    /// Wait id of the request; the answer carries the same number.
    wid: i32,
    /// How many resource managers had died before the request; a higher number shows that the
    /// resource manager of this request has died. `None` in a forked child.
    deaths_before_request: Option<u64>,
}

/// Maximum time that a queued spawn request waits for a new resource manager after the old resource
/// manager has died. The master starts a new resource manager immediately, so a longer wait would
/// be useless.
const NEXT_RM_TIMEOUT: Duration = Duration::from_secs(10);

impl Runtime {
    /// Starts tasks. If this task holds a placement lease that covers the request
    /// ([`sempa_proto::sm::PlacementLease`]), the daemons start the tasks on the leased hosts.
    /// Otherwise the resource manager places the tasks, or the daemon if there is no resource
    /// manager.
    ///
    /// If the resource manager dies before it answers, the request is sent to the daemon; tasks
    /// that the resource manager had started keep running. A request that was waiting for a free
    /// slot continues to wait at the next resource manager, if one registers within ten seconds.
    ///
    /// The settings of the job file in the environment are added ([`crate::job`]).
    ///
    /// # Errors
    /// The whole request failed. Errors of single tasks are in their results.
    pub fn spawn(&self, mut request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        crate::job::apply_to_request(crate::job::from_process_env(), &mut request)?;
        let Some(mut results) = self.spawn_leased(&request) else {
            return self.spawn_unleased(request);
        };
        // Tasks that could not be started with the lease are requested again without a lease. The
        // results contain the errors of the second attempt.
        request.task_count = results.iter().filter(|result| result.is_err()).count() as u32;
        if request.task_count > 0
            && let Ok(retry_results) = self.spawn_unleased(request)
        {
            results
                .iter_mut()
                .filter(|result| result.is_err())
                .zip(retry_results)
                .for_each(|(result, retry_result)| *result = retry_result);
        }
        Ok(results)
    }

    /// Starts tasks through the resource manager or the daemon, without a placement lease.
    fn spawn_unleased(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let operation = "spawning tasks";
        let mut waiting_since = None;
        while let Some(target) = self.new_call_target(|services| services.placement) {
            self.with_core_mut(|core, now| {
                core.placement_leases
                    .record_request(now, target.rm, target.wid, &request)
            });
            match self.call_rm_target(&target, SM_SPAWN, pack_spawn(&request, waiting_since))? {
                RmOutcome::Answer(body) => {
                    let results = unpack_tids(body).map_err(|e| rm_error(operation, e))?;
                    if results.len() != request.task_count as usize {
                        return Err(rm_error(operation, PvmError::Mismatch));
                    }
                    return Ok(results);
                }
                RmOutcome::RetryWithNextRm {
                    dead_rm: dead_manager,
                    waiting_since: wait_start,
                } => {
                    waiting_since = Some(wait_start);
                    self.wait_for_next_rm(dead_manager);
                }
                RmOutcome::UseDaemon => break,
            }
        }
        match self.request_and_wait(Request::Spawn(request)) {
            Reply::Spawned(results) => Ok(results),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Returns the host table. If a resource manager sends the table, the table has no addresses
    /// and no epoch.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn config(&self) -> Result<HostTable, Error> {
        let operation = "reading the host table";
        if let RmOutcome::Answer(body) =
            self.call_rm(|services| services.vm_requests, SM_CONFIG, Bytes::new)?
        {
            return unpack_config(body).map_err(|e| rm_error(operation, e));
        }
        match self.request_and_wait(Request::Config) {
            Reply::Hosts(table) => Ok(table),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Returns the tasks that `selector` selects: all tasks ([`Tid::NONE`]), the tasks of one host,
    /// or one task.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let mut tasks = self.tasks_and_leftovers(selector)?;
        tasks.retain(|task| !task.is_leftover());
        Ok(tasks)
    }

    /// As [`Runtime::tasks`], with an entry for each ended task that has left processes behind
    /// ([`TaskInfo::is_leftover`]). Tasks that PVM does not have ([`TaskInfo::is_hidden`]) are
    /// omitted.
    ///
    /// # Errors
    /// As [`Runtime::tasks`].
    pub fn tasks_and_leftovers(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let operation = "listing tasks";
        let pack = || {
            let mut out = Packer::new(Encoding::Xdr);
            out.pack_int(selector.raw());
            out.finish()
        };
        if let RmOutcome::Answer(body) =
            self.call_rm(|services| services.vm_requests, SM_TASK, pack)?
        {
            return unpack_tasks(body).map_err(|e| rm_error(operation, e));
        }
        match self.request_and_wait(Request::Tasks { selector }) {
            Reply::Tasks(mut tasks) => {
                tasks.retain(|task| !task.is_hidden());
                Ok(tasks)
            }
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Adds hosts. Each line has the format of a host-file line. Returns one result for each line.
    ///
    /// # Errors
    /// The whole request failed. Errors of single hosts are in their results.
    pub fn add_hosts(&self, lines: Vec<String>) -> Result<Vec<AddedHost>, Error> {
        let operation = "adding hosts";
        if let RmOutcome::Answer(body) = self.call_rm(
            |services| services.vm_requests,
            SM_ADDHOST,
            || pack_names(&lines),
        )? {
            let added_hosts = unpack_added_hosts(body).map_err(|e| rm_error(operation, e))?;
            if added_hosts.len() != lines.len() {
                return Err(rm_error(operation, PvmError::OutOfRes));
            }
            return Ok(added_hosts);
        }
        match self.request_and_wait(Request::AddHosts {
            host_file_lines: lines,
        }) {
            Reply::HostsAdded(added_hosts) => Ok(added_hosts),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Removes hosts by name and returns one result for each name.
    ///
    /// # Errors
    /// The whole request failed. Errors of single hosts are in their results.
    pub fn delete_hosts(&self, names: Vec<String>) -> Result<Vec<Result<(), PvmError>>, Error> {
        let operation = "deleting hosts";
        if let RmOutcome::Answer(body) = self.call_rm(
            |services| services.vm_requests,
            SM_DELHOST,
            || pack_names(&names),
        )? {
            return unpack_deleted_hosts(body).map_err(|e| rm_error(operation, e));
        }
        match self.request_and_wait(Request::DelHosts { host_names: names }) {
            Reply::HostsDeleted(results) => Ok(results),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Requests messages about tasks that end, or hosts that join or leave. If a resource manager
    /// serves the request, `Ok` only means that the request was sent: a resource manager sends no
    /// confirmation.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn notify(&self, request: NotifyRequest) -> Result<(), Error> {
        if let Some(rm) = self.rm_serving(|services| services.vm_requests) {
            let body = pack_notify(&request);
            let dst = rm.tid;
            let message = Message {
                src: self.tid(),
                dst,
                ctx: CTX_BASE,
                tag: SM_NOTIFY,
                wid: self.allocate_wid(),
                enc: ENC_XDR,
                body,
            };
            return self.send(message).map_err(Error::from);
        }
        match self.request_and_wait(Request::Notify(request)) {
            Reply::Done => Ok(()),
            other => Err(Error::from_reply("asking for notification", other)),
        }
    }

    /// Registers this task as resource manager. If another resource manager that serves all
    /// requests is registered, that resource manager receives the request and may refuse; otherwise
    /// the daemon accepts any task. Returns the same values as PVM: the tid of the previous
    /// resource manager (NONE if there was none) and the master's host entry (`None` if the host
    /// table does not contain the master).
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn register_rm(&self, services: RmServices) -> Result<(Tid, Option<HostEntry>), Error> {
        let operation = "registering a resource manager";
        if let RmOutcome::Answer(body) =
            self.call_rm(|services| services.vm_requests, SM_SCHED, Bytes::new)?
        {
            let (previous_rm, master) =
                unpack_registration(body).map_err(|e| rm_error(operation, e))?;
            return Ok((previous_rm, Some(master)));
        }
        let previous_rm = match self.request_and_wait(Request::RegisterRm(services)) {
            Reply::Rm { previous_rm } => previous_rm,
            other => return Err(Error::from_reply(operation, other)),
        };
        match self.request_and_wait(Request::Config) {
            Reply::Hosts(table) => Ok((previous_rm, table.get(HostId::MASTER).cloned())),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Returns the registered resource manager. Returns `None` if `has_service` is false for the
    /// services of that resource manager, or if this task is the resource manager.
    fn rm_serving(&self, has_service: impl Fn(RmServices) -> bool) -> Option<RmInfo> {
        self.rm()
            .filter(|rm| has_service(rm.services) && rm.tid != self.tid())
    }

    /// Starts tasks with a placement lease. Returns `None` if no lease matches the request or the
    /// daemons do not accept the lease.
    fn spawn_leased(&self, request: &SpawnRequest) -> Option<Vec<Result<Tid, PvmError>>> {
        let placement_lease =
            self.with_core_mut(|core, now| core.placement_leases.take_hosts_for(now, request))??;
        match self.request_and_wait(Request::SpawnLeased {
            request: request.clone(),
            lease: placement_lease,
        }) {
            Reply::Spawned(results) if results.len() == request.task_count as usize => {
                Some(results)
            }
            _ => None,
        }
    }

    /// Allocates a wait id for a request to the resource manager. Returns `None` if no resource
    /// manager serves this kind of request.
    fn new_call_target(&self, has_service: impl Fn(RmServices) -> bool) -> Option<RmCallTarget> {
        // The number of deaths is read first, so that a death between the two reads is detected.
        let death_count = self.with_core(|core| core.rm_deaths());
        let rm = self.rm_serving(has_service)?.tid;
        Some(RmCallTarget {
            rm,
            wid: self.allocate_wid(),
            deaths_before_request: death_count,
        })
    }

    fn call_rm(
        &self,
        has_service: impl Fn(RmServices) -> bool,
        tag: i32,
        pack: impl FnOnce() -> Bytes,
    ) -> Result<RmOutcome, Error> {
        self.new_call_target(has_service)
            .map_or(Ok(RmOutcome::UseDaemon), |target| {
                self.call_rm_target(&target, tag, pack())
            })
    }

    /// Sends one request to the resource manager and waits for the answer, which has the same tag.
    /// If the resource manager dies first, the outcome says where to send the request next.
    fn call_rm_target(
        &self,
        target: &RmCallTarget,
        tag: i32,
        body: Bytes,
    ) -> Result<RmOutcome, Error> {
        let RmCallTarget {
            rm,
            wid,
            deaths_before_request: deaths_before,
        } = *target;
        let message = Message {
            src: self.tid(),
            dst: rm,
            ctx: CTX_BASE,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        };
        let _call_guard = self.register_rm_call(rm, tag, wid);
        self.send(message)?;
        let mut check_answer = |core: &mut Core| {
            if let Some(body) = core.rm_calls.take_answer(wid) {
                return Some(RmOutcome::Answer(body));
            }
            if Some(core.rm_deaths()) == deaths_before && !core.has_peer_ended(rm) {
                return None;
            }
            Some(
                core.rm_calls
                    .waiting_since(wid)
                    .map_or(RmOutcome::UseDaemon, |wait_start| {
                        RmOutcome::RetryWithNextRm {
                            dead_rm: rm,
                            waiting_since: wait_start,
                        }
                    }),
            )
        };
        match self.wait_with_intake(None, &mut check_answer) {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => Ok(RmOutcome::UseDaemon),
            Err(e) => Err(Error::new(e, self.lost_reason())),
        }
    }

    /// Waits until a resource manager other than `dead_rm` is registered, at most
    /// [`NEXT_RM_TIMEOUT`].
    fn wait_for_next_rm(&self, dead_rm: Tid) {
        let mut find_next_rm = |core: &mut Core| core.rm().filter(|rm| rm.tid != dead_rm).map(drop);
        // If no resource manager registers or the daemon is lost, the next request fails with the
        // reason.
        let next_rm_deadline = Instant::now() + NEXT_RM_TIMEOUT;
        let _ = self.wait_with_intake(Some(next_rm_deadline), &mut find_next_rm);
    }
}

fn rm_error(operation: &str, code: PvmError) -> Error {
    Error::new(
        code,
        format!("{operation}: the resource manager replied {code}"),
    )
}

fn pack_names(names: &[String]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_strs(names);
    out.finish()
}

fn pack_notify(request: &NotifyRequest) -> Bytes {
    let (kind_code, count, tids): (i32, i32, &[Tid]) = match &request.subjects {
        NotifySubjects::TaskExit(tids) => (NOTIFY_TASK_EXIT, tids.len() as i32, tids),
        NotifySubjects::HostDelete(tids) => (NOTIFY_HOST_DELETE, tids.len() as i32, tids),
        NotifySubjects::HostAdd {
            messages_max: count,
        } => (NOTIFY_HOST_ADD, *count, &[]),
    };
    let kind_code = if request.is_cancellation {
        kind_code + NOTIFY_CANCEL
    } else {
        kind_code
    };
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(kind_code)
        .pack_int(request.ctx)
        .pack_int(request.tag)
        .pack_int(count)
        .pack_items(tids.iter().map(|tid| tid.raw()));
    out.finish()
}

/// Reads a count. A negative value is an error code.
fn unpack_count(unpacker: &mut Unpacker) -> PvmResult<usize> {
    let count = unpacker.read_int()?;
    usize::try_from(count).map_err(|_| PvmError::from_code(count).unwrap_or(PvmError::BadMsg))
}

/// Reads a host in the format of `SM_CONFIG` and `SM_ADDHOST`. The first integer is the host's tid,
/// or an error code.
fn unpack_host(unpacker: &mut Unpacker) -> PvmResult<Result<HostEntry, PvmError>> {
    let raw_tid = unpacker.read_int()?;
    let (name, arch, speed, dsig) = (
        unpacker.read_string()?,
        unpacker.read_string()?,
        unpacker.read_int()?,
        unpacker.read_int()?,
    );
    let tid = Tid::from_raw(raw_tid);
    Ok(match tid.birth_host() {
        Some(id) if raw_tid > 0 && tid == id.tid() => Ok(HostEntry {
            id,
            name,
            arch,
            speed,
            dsig,
            addresses: Vec::new(),
        }),
        _ => Err(PvmError::from_code(raw_tid).unwrap_or(PvmError::BadMsg)),
    })
}

fn unpack_config(body: Bytes) -> PvmResult<HostTable> {
    let mut unpacker = Unpacker::new_xdr(body);
    let count = unpack_count(&mut unpacker)?;
    let _format_count = unpacker.read_int()?;
    let mut hosts = Vec::new();
    for _ in 0..count {
        hosts.push(unpack_host(&mut unpacker)??);
    }
    Ok(HostTable {
        epoch: Epoch(0),
        hosts,
    })
}

fn unpack_registration(body: Bytes) -> PvmResult<(Tid, HostEntry)> {
    let mut unpacker = Unpacker::new_xdr(body);
    let previous_rm = unpacker.read_int()?;
    if previous_rm < 0 {
        return Err(PvmError::from_code(previous_rm).unwrap_or(PvmError::Denied));
    }
    Ok((Tid::from_raw(previous_rm), unpack_host(&mut unpacker)??))
}

fn unpack_added_hosts(body: Bytes) -> PvmResult<Vec<AddedHost>> {
    let mut unpacker = Unpacker::new_xdr(body);
    let count = unpack_count(&mut unpacker)?;
    let _format_count = unpacker.read_int()?;
    let mut added_hosts = Vec::new();
    for _ in 0..count {
        let result = unpack_host(&mut unpacker)?;
        let reason = result.as_ref().err().map_or_else(String::new, |e| {
            format!("the resource manager reports: {e}")
        });
        added_hosts.push(AddedHost { result, reason });
    }
    Ok(added_hosts)
}

fn unpack_deleted_hosts(body: Bytes) -> PvmResult<Vec<Result<(), PvmError>>> {
    let mut unpacker = Unpacker::new_xdr(body);
    let count = unpack_count(&mut unpacker)?;
    let mut results = Vec::new();
    for _ in 0..count {
        let status = unpacker.read_int()?;
        let status_error = || PvmError::from_code(status).unwrap_or(PvmError::BadMsg);
        results.push(if status < 0 {
            Err(status_error())
        } else {
            Ok(())
        });
    }
    Ok(results)
}

fn unpack_tasks(body: Bytes) -> PvmResult<Vec<TaskInfo>> {
    let mut unpacker = Unpacker::new_xdr(body);
    let code = unpacker.read_int()?;
    if code < 0 {
        return Err(PvmError::from_code(code).unwrap_or(PvmError::BadMsg));
    }
    let mut tasks = Vec::new();
    while unpacker.remaining() > 0 {
        let (tid, parent) = (
            Tid::from_raw(unpacker.read_int()?),
            Tid::from_raw(unpacker.read_int()?),
        );
        let host = Tid::from_raw(unpacker.read_int()?)
            .birth_host()
            .ok_or(PvmError::BadMsg)?;
        let (flags, name, pid) = (
            unpacker.read_int()?,
            unpacker.read_string()?,
            unpacker.read_int()?,
        );
        // The message does not contain the user id; a virtual machine belongs to one user.
        let uid = nix::unistd::geteuid().as_raw();
        tasks.push(TaskInfo {
            tid,
            parent,
            host,
            flags,
            name,
            pid,
            uid,
            migrating: false,
            paused: false,
            suspended: false,
            namespace_pid: pid,
            stopping: false,
            leftover_processes: 0,
        });
    }
    Ok(tasks)
}
