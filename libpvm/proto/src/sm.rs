//! PVM's documented messages between tasks, resource managers and daemons (`SM_*`), in PVM's
//! default encoding.
//!
//! These messages are ordinary PVM messages in context 0; the wait id pairs request and reply.
//! Therefore a resource manager written for PVM 3.4 works with Sempa's daemons, and Sempa's
//! resource manager works with the daemons of PVM.

use crate::body::{Encoding, Packer, Unpacker};
use crate::error::{PvmError, PvmResult};
use crate::ids::{HostId, Micros, Tid};
use crate::migration::Usage;
use crate::task::{Sink, SpawnRequest};
use bytes::Bytes;

const SM_BASE: i32 = 0x8004_0001_u32 as i32;

/// Task to resource manager and back: `pvm_spawn`.
pub const SM_SPAWN: i32 = SM_BASE;
/// Resource manager to daemon: start tasks on the daemon's host.
pub const SM_EXEC: i32 = SM_BASE + 1;
/// Daemon to resource manager: tasks were started, or a task from a command line has connected.
pub const SM_EXECACK: i32 = SM_BASE + 2;
/// Task to resource manager and back: `pvm_tasks`.
pub const SM_TASK: i32 = SM_BASE + 3;
/// Task to resource manager and back: `pvm_config`.
pub const SM_CONFIG: i32 = SM_BASE + 4;
/// Task to resource manager and back: `pvm_addhosts`.
pub const SM_ADDHOST: i32 = SM_BASE + 5;
/// Task to resource manager and back: `pvm_delhosts`.
pub const SM_DELHOST: i32 = SM_BASE + 6;
/// Resource manager to master: add hosts.
pub const SM_ADD: i32 = SM_BASE + 7;
/// Master to resource manager: hosts were added.
pub const SM_ADDACK: i32 = SM_BASE + 8;
/// Task to resource manager: `pvm_notify`.
pub const SM_NOTIFY: i32 = SM_BASE + 9;
/// Daemon to resource manager: a task ended.
pub const SM_TASKX: i32 = SM_BASE + 10;
/// Master to its resource manager: a host left the virtual machine.
pub const SM_HOSTX: i32 = SM_BASE + 11;
/// Resource manager to its daemon: another resource manager replaces the sender.
pub const SM_HANDOFF: i32 = SM_BASE + 12;
/// Task to resource manager and back: `pvm_reg_rm`.
pub const SM_SCHED: i32 = SM_BASE + 13;
/// Master to hoster: start daemons.
pub const SM_STHOST: i32 = SM_BASE + 14;
/// Hoster to master: daemons were started.
pub const SM_STHOSTACK: i32 = SM_BASE + 15;
/// Daemon to tasker: start a task.
pub const SM_STTASK: i32 = SM_BASE + 16;

/// Resource manager to task, not in PVM: the task's request [`SM_SPAWN`] starts or stops waiting
/// for hosts; none of its tasks has been started. If the resource manager dies, the task may send
/// the request to the next resource manager.
pub const SM_SPAWN_WAITS: i32 = SM_BASE + 0x100;
/// Resource manager to task, not in PVM: grants a [`PlacementLease`], that is, hosts for the task's
/// next spawns. The message has the wait id of a spawn request. The task can start the tasks of
/// later requests that need the same placement without asking the resource manager.
pub const SM_PLACEMENT_LEASE: i32 = SM_BASE + 0x101;
/// Daemon to resource manager, not in PVM: tasks were started by a placement lease. The message has
/// the wait id of the lease.
pub const SM_PLACEMENT_LEASE_USED: i32 = SM_BASE + 0x102;
/// Load watcher or resource manager to its daemon, not in PVM: the sender runs. The answer to
/// [`crate::rm::TAG_PING`], and an announcement that the sender answers such questions.
pub const SM_ALIVE: i32 = SM_BASE + 0x103;

/// Well-known mailbox class of resource managers.
pub const RM_CLASS: &str = "###_PVM_RM_###";
/// Well-known mailbox class of hosters.
pub const HOSTER_CLASS: &str = "###_PVM_HOSTER_###";
/// Well-known mailbox class of taskers.
pub const TASKER_CLASS: &str = "###_PVM_TASKER_###";
/// Well-known mailbox class of the tracer.
pub const TRACER_CLASS: &str = "###_PVM_TRACER_###";
/// Well-known mailbox class of tasks that are exempt from a reset.
pub const NO_RESET_CLASS: &str = "###_PVM_NO_RESET_###";

fn pack_sink(out: &mut Packer, sink: Sink) {
    out.pack_int(sink.tid.raw())
        .pack_int(sink.ctx)
        .pack_int(sink.tag);
}

fn unpack_sink(input: &mut Unpacker) -> PvmResult<Sink> {
    Ok(Sink {
        tid: Tid::from_raw(input.read_int()?),
        ctx: input.read_int()?,
        tag: input.read_int()?,
    })
}

fn unpack_byte_strings(input: &mut Unpacker) -> PvmResult<Vec<Vec<u8>>> {
    let count = usize::try_from(input.read_int()?).map_err(|_| PvmError::BadMsg)?;
    if count.saturating_mul(4) > input.remaining() {
        return Err(PvmError::NoData);
    }
    (0..count).map(|_| Ok(input.read_str()?.to_vec())).collect()
}

fn pack_time(out: &mut Packer, time: Micros) {
    out.pack_int((time.0 >> 32) as i32).pack_int(time.0 as i32);
}

fn unpack_time(input: &mut Unpacker) -> PvmResult<Micros> {
    let half = |input: &mut Unpacker| input.read_int().map(|half| u64::from(half.cast_unsigned()));
    Ok(Micros(half(input)? << 32 | half(input)?))
}

/// Encodes the body of [`SM_SPAWN_WAITS`]. `since` is the time of day at which the request started
/// to wait; `None` if the request has stopped waiting.
pub fn pack_spawn_waits(since: Option<Micros>) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    pack_time(&mut out, since.unwrap_or_default());
    out.finish()
}

/// Decodes the body of [`SM_SPAWN_WAITS`]. Returns the time of day at which the request started to
/// wait; `None` if the request has stopped waiting.
///
/// # Errors
/// [`PvmError::NoData`] if the body is too short.
pub fn unpack_spawn_waits(body: Bytes) -> PvmResult<Option<Micros>> {
    Ok(Some(unpack_time(&mut Unpacker::new_xdr(body))?).filter(|time| *time != Micros::default()))
}

/// Maximum number of hosts in a placement lease.
pub const LEASE_HOSTS_MAX: usize = 3 * LEASE_TASKS_MAX;
/// Maximum number of tasks in a request for which a placement lease can be granted. For larger
/// requests the round trip to the resource manager is short compared to the start of the tasks.
pub const LEASE_TASKS_MAX: usize = 16;

/// A placement lease: hosts that a resource manager assigns to future spawn requests of a task.
///
/// A task may spawn repeatedly, by requests for the same number of tasks with the same program,
/// place, flags and environment. With a lease the task need not send each request to the resource
/// manager. The design follows Condor's claims, by which a queue starts successive jobs on a
/// machine without asking the matchmaker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementLease {
    /// Hosts of the next tasks, in order of use; at most [`LEASE_HOSTS_MAX`].
    pub hosts: Vec<HostId>,
    /// Time for which the lease is valid after the last spawn request to which it applies.
    pub validity_time: Micros,
}

/// Encodes the body of [`SM_PLACEMENT_LEASE`].
pub fn pack_placement_lease(lease: &PlacementLease) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    pack_time(&mut out, lease.validity_time);
    out.pack_int(lease.hosts.len() as i32)
        .pack_items(lease.hosts.iter().map(|host| host.tid().raw()));
    out.finish()
}

/// Decodes the body of [`SM_PLACEMENT_LEASE`].
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_placement_lease(body: Bytes) -> PvmResult<PlacementLease> {
    let mut input = Unpacker::new_xdr(body);
    let (validity_time, count) = (unpack_time(&mut input)?, input.read_int()?);
    if usize::try_from(count).is_ok_and(|count| count > LEASE_HOSTS_MAX) {
        return Err(PvmError::BadMsg);
    }
    let hosts = input
        .read_ints(count)?
        .into_iter()
        .map(|raw| Tid::from_raw(raw).birth_host().ok_or(PvmError::BadMsg));
    Ok(PlacementLease {
        hosts: hosts.collect::<PvmResult<_>>()?,
        validity_time,
    })
}

/// Record of the tasks that one request started by a placement lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementLeaseUse {
    /// The task that made the request.
    pub spawner: Tid,
    /// Host and tid of each task; at most [`LEASE_TASKS_MAX`].
    pub tasks: Vec<(HostId, Tid)>,
}

/// Encodes the body of [`SM_PLACEMENT_LEASE_USED`].
pub fn pack_placement_lease_use(lease_use: &PlacementLeaseUse) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(lease_use.spawner.raw())
        .pack_int(lease_use.tasks.len() as i32);
    for (host, tid) in &lease_use.tasks {
        out.pack_int(host.tid().raw()).pack_int(tid.raw());
    }
    out.finish()
}

/// Decodes the body of [`SM_PLACEMENT_LEASE_USED`].
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_placement_lease_use(body: Bytes) -> PvmResult<PlacementLeaseUse> {
    let mut input = Unpacker::new_xdr(body);
    let (spawner, count) = (Tid::from_raw(input.read_int()?), input.read_int()?);
    let count = usize::try_from(count)
        .ok()
        .filter(|count| (1..=LEASE_TASKS_MAX).contains(count));
    let mut unpack_task = || {
        let (host, tid) = (
            Tid::from_raw(input.read_int()?),
            Tid::from_raw(input.read_int()?),
        );
        Ok((
            host.birth_host().ok_or(PvmError::BadMsg)?,
            Some(tid)
                .filter(|tid| tid.is_task())
                .ok_or(PvmError::BadMsg)?,
        ))
    };
    let tasks = (0..count.ok_or(PvmError::BadMsg)?)
        .map(|_| unpack_task())
        .collect::<PvmResult<_>>()?;
    if !spawner.is_task() {
        return Err(PvmError::BadMsg);
    }
    Ok(PlacementLeaseUse { spawner, tasks })
}

/// Encodes the body of a request [`SM_SPAWN`]. `since` is the time at which the request started to
/// wait with a previous resource manager, which has died; `None` for a new request.
pub fn pack_spawn(request: &SpawnRequest, since: Option<Micros>) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_str(request.program.as_bytes())
        .pack_int(request.flags)
        .pack_str(request.where_arg.as_bytes())
        .pack_int(request.task_count as i32);
    out.pack_strs(&request.args);
    pack_sink(&mut out, request.output_sink);
    pack_sink(&mut out, request.trace_sink);
    out.pack_strs(&request.env);
    if let Some(since) = since {
        // This field is not in PVM, which ignores bytes after its own fields.
        pack_time(&mut out, since);
    }
    out.finish()
}

/// Decodes the body of a request [`SM_SPAWN`]. Also returns the time at which the request started
/// to wait with a previous resource manager; `None` for a new request.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_spawn(body: Bytes) -> PvmResult<(SpawnRequest, Option<Micros>)> {
    let mut input = Unpacker::new_xdr(body);
    let (program, flags, where_arg) = (
        input.read_string()?,
        input.read_int()?,
        input.read_string()?,
    );
    let task_count = u32::try_from(input.read_int()?).map_err(|_| PvmError::BadMsg)?;
    let args = unpack_byte_strings(&mut input)?;
    let (output_sink, trace_sink) = (unpack_sink(&mut input)?, unpack_sink(&mut input)?);
    let env = unpack_byte_strings(&mut input)?;
    let since = if input.remaining() > 0 {
        unpack_time(&mut input).ok()
    } else {
        None
    };
    Ok((
        SpawnRequest {
            program,
            args,
            flags,
            where_arg,
            task_count,
            env,
            output_sink,
            trace_sink,
            past: Default::default(),
        },
        since,
    ))
}

/// Encodes the body of [`SM_EXEC`], which starts tasks on the daemon's host for `parent`.
/// `first_position` is the position of the first of these tasks in the whole spawn, and
/// `task_count` the number of tasks in the whole spawn.
pub fn pack_exec(
    parent: Tid,
    request: &SpawnRequest,
    first_position: i32,
    task_count: i32,
) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(parent.raw())
        .pack_str(request.program.as_bytes())
        .pack_int(request.flags)
        .pack_int(request.task_count as i32);
    out.pack_strs(&request.args);
    pack_sink(&mut out, request.output_sink);
    pack_sink(&mut out, request.trace_sink);
    out.pack_strs(&request.env)
        .pack_int(first_position)
        .pack_int(task_count);
    // This field is not in PVM, which ignores bytes after its own fields. The field transfers the
    // working directory that `where_arg` contains.
    out.pack_str(request.where_arg.as_bytes());
    out.finish()
}

/// Decodes the body of [`SM_EXEC`]. The two integers for the position and the number of tasks in
/// the whole spawn must be present, but their values are ignored. A string after the two integers
/// is the request's `where_arg`; without a valid string, `where_arg` is empty.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_exec(body: Bytes) -> PvmResult<(Tid, SpawnRequest)> {
    let mut input = Unpacker::new_xdr(body);
    let parent = Tid::from_raw(input.read_int()?);
    let (program, flags) = (input.read_string()?, input.read_int()?);
    let task_count = u32::try_from(input.read_int()?).map_err(|_| PvmError::BadMsg)?;
    let args = unpack_byte_strings(&mut input)?;
    let (output_sink, trace_sink) = (unpack_sink(&mut input)?, unpack_sink(&mut input)?);
    let env = unpack_byte_strings(&mut input)?;
    let _position = (input.read_int()?, input.read_int()?);
    let where_arg = if input.remaining() > 0 {
        input.read_string().unwrap_or_default()
    } else {
        String::new()
    };
    Ok((
        parent,
        SpawnRequest {
            program,
            args,
            flags,
            where_arg,
            task_count,
            env,
            output_sink,
            trace_sink,
            past: Default::default(),
        },
    ))
}

/// Encodes the body of the replies [`SM_SPAWN`] and [`SM_EXECACK`]: a count, then a tid or an error
/// code for each task.
pub fn pack_tids(results: &[Result<Tid, PvmError>]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(results.len() as i32);
    out.pack_items(
        results
            .iter()
            .map(|r| r.as_ref().map_or_else(|e| e.code(), |tid| tid.raw())),
    );
    out.finish()
}

/// Decodes a body that [`pack_tids`] encoded.
///
/// # Errors
/// The error code that the peer sent in place of the count; [`PvmError::NoData`] or
/// [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_tids(body: Bytes) -> PvmResult<Vec<Result<Tid, PvmError>>> {
    let mut input = Unpacker::new_xdr(body);
    let count = input.read_int()?;
    if count < 0 {
        return Err(PvmError::from_code(count).unwrap_or(PvmError::BadMsg));
    }
    let codes = input.read_ints(count)?;
    let task_tid = |raw: i32| {
        let task_tid = Tid::from_raw(raw);
        if task_tid.is_task() {
            Ok(task_tid)
        } else {
            Err(PvmError::from_code(raw).unwrap_or(PvmError::BadMsg))
        }
    };
    Ok(codes.into_iter().map(task_tid).collect())
}

/// A request to a tasker to start a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskerStartRequest {
    /// Tid of the new task.
    pub tid: Tid,
    /// Bitwise combination of `PvmTask*` values.
    pub flags: i32,
    /// Absolute path of the program.
    pub path: Vec<u8>,
    /// All arguments, including `argv[0]`.
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value` strings to add to the tasker's own environment; `PVMEPID` is the first.
    pub env: Vec<Vec<u8>>,
    /// Three numbers: position of the task in this request, number of tasks in this request, number
    /// of tasks in the whole spawn.
    pub spawn_position: [i32; 3],
}

/// Encodes the body of [`SM_STTASK`].
pub fn pack_tasker_start(request: &TaskerStartRequest) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(request.tid.raw())
        .pack_int(request.flags)
        .pack_str(&request.path);
    out.pack_strs(&request.argv)
        .pack_strs(&request.env)
        .pack_items(request.spawn_position);
    out.finish()
}

/// Report about a task that has ended or could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskExit {
    pub tid: Tid,
    /// Wait status of the task's process.
    pub status: i32,
    /// Resources that the task used.
    pub usage: Usage,
}

/// Encodes the body of [`SM_TASKX`].
pub fn pack_task_exit(task_exit: &TaskExit) -> Bytes {
    let (seconds, remaining_micros) = (
        |t: Micros| (t.0 / 1_000_000) as i32,
        |t: Micros| (t.0 % 1_000_000) as i32,
    );
    let Usage { user, system, .. } = task_exit.usage;
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_items([
        task_exit.tid.raw(),
        task_exit.status,
        seconds(user),
        remaining_micros(user),
        seconds(system),
        remaining_micros(system),
    ]);
    out.finish()
}

/// Decodes the body of [`SM_TASKX`]. Missing times count as 0.
///
/// # Errors
/// [`PvmError::NoData`] if the tid or the status is missing.
pub fn unpack_task_exit(body: Bytes) -> PvmResult<TaskExit> {
    let mut input = Unpacker::new_xdr(body);
    let (tid, status) = (Tid::from_raw(input.read_int()?), input.read_int()?);
    let mut unpack_duration = || {
        let (seconds, micros) = (
            input.read_int().unwrap_or(0).max(0) as u64,
            input.read_int().unwrap_or(0).max(0) as u64,
        );
        Micros(seconds * 1_000_000 + micros)
    };
    let (user, system) = (unpack_duration(), unpack_duration());
    Ok(TaskExit {
        tid,
        status,
        usage: Usage {
            user,
            system,
            ..Usage::default()
        },
    })
}

/// A request to a hoster to start a daemon on another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HosterStartRequest {
    /// Tid of the new host.
    pub host_tid: Tid,
    /// Value of the host-file option `so=`; empty if the option is not set.
    pub so_option: String,
    /// Login name for ssh: `host` or `user@host`.
    pub login: String,
    /// Command to run on the new host.
    pub command: String,
    /// Name of the virtual machine, sent to the command's standard input as `PVM_VMID=…`. If the
    /// name is empty, nothing is sent.
    pub vmid: String,
}

/// Encodes the body of [`SM_STHOST`].
pub fn pack_hoster_starts(requests: &[HosterStartRequest]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.pack_int(requests.len() as i32);
    for request in requests {
        out.pack_int(request.host_tid.raw())
            .pack_str(request.so_option.as_bytes())
            .pack_str(request.login.as_bytes());
        // PVM's additional command for Windows hosts is always empty.
        out.pack_str(request.command.as_bytes())
            .pack_str(b"")
            .pack_str(request.vmid.as_bytes());
    }
    out.finish()
}

/// Decodes the body of [`SM_STHOSTACK`]. Returns the tid of each host, with the line that the
/// started daemon printed, or with the name of an error.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_hoster_reply(body: Bytes) -> PvmResult<Vec<(Tid, String)>> {
    let mut input = Unpacker::new_xdr(body);
    let count = usize::try_from(input.read_int()?).map_err(|_| PvmError::BadMsg)?;
    if count.saturating_mul(8) > input.remaining() {
        return Err(PvmError::NoData);
    }
    (0..count)
        .map(|_| Ok((Tid::from_raw(input.read_int()?), input.read_string()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_request() -> SpawnRequest {
        SpawnRequest {
            program: "hello".into(),
            args: vec![b"-v".to_vec(), b"\xff".to_vec()],
            flags: 64,
            where_arg: ":/var".into(),
            task_count: 3,
            env: vec![b"PVMCTX=0x0".to_vec()],
            output_sink: Sink {
                tid: Tid::from_raw(0x40001),
                ctx: 5,
                tag: 6,
            },
            trace_sink: Sink::default(),
            past: Default::default(),
        }
    }

    #[test]
    fn spawn_and_exec_round_trip() {
        assert_eq!(
            unpack_spawn(pack_spawn(&example_request(), None)),
            Ok((example_request(), None))
        );
        let since = Some(Micros(0x6_1234_8765_4321));
        assert_eq!(
            unpack_spawn(pack_spawn(&example_request(), since)),
            Ok((example_request(), since))
        );
        assert_eq!(
            (
                unpack_spawn_waits(pack_spawn_waits(since)),
                unpack_spawn_waits(pack_spawn_waits(None))
            ),
            (Ok(since), Ok(None))
        );
        let parent = Tid::from_raw(0x40002);
        assert_eq!(
            unpack_exec(pack_exec(parent, &example_request(), 0, 3)),
            Ok((parent, example_request()))
        );
    }

    #[test]
    fn exec_requires_only_the_two_trailing_ints() {
        let full_body = pack_exec(Tid::NONE, &example_request(), 0, 3);
        let mut place_packer = Packer::new(Encoding::Xdr);
        place_packer.pack_str(example_request().where_arg.as_bytes());
        let body_without_place = full_body.slice(..full_body.len() - place_packer.len());
        assert_eq!(
            unpack_exec(body_without_place.clone()).map(|(_, r)| r.where_arg),
            Ok(String::new())
        );
        assert_eq!(
            unpack_exec(body_without_place.slice(..body_without_place.len() - 4)),
            Err(PvmError::NoData)
        );
    }

    #[test]
    fn task_exit_round_trips_and_times_are_optional() {
        let usage = Usage {
            user: Micros(1_500_000),
            system: Micros(7),
            ..Usage::default()
        };
        let task_exit = TaskExit {
            tid: Tid::from_raw(0x40001),
            status: 0x100,
            usage,
        };
        let body = pack_task_exit(&task_exit);
        assert_eq!(unpack_task_exit(body.clone()), Ok(task_exit));
        let exit_without_times = unpack_task_exit(body.slice(..8));
        assert_eq!(
            exit_without_times,
            Ok(TaskExit {
                usage: Usage::default(),
                ..task_exit
            })
        );
        assert_eq!(unpack_task_exit(body.slice(..4)), Err(PvmError::NoData));
    }

    #[test]
    fn hostile_hoster_replies_are_refused() {
        for count in [-1, i32::MAX] {
            let mut out = Packer::new(Encoding::Xdr);
            out.pack_int(count);
            assert!(unpack_hoster_reply(out.finish()).is_err());
        }
        let mut out = Packer::new(Encoding::Xdr);
        out.pack_int(1).pack_int(0x80000).pack_str(b"PvmCantStart");
        assert_eq!(
            unpack_hoster_reply(out.finish()),
            Ok(vec![(Tid::from_raw(0x80000), "PvmCantStart".into())])
        );
    }

    #[test]
    fn tids_and_errors_share_one_list() {
        let results = [Ok(Tid::from_raw(0x40001)), Err(PvmError::NoFile)];
        assert_eq!(unpack_tids(pack_tids(&results)), Ok(results.to_vec()));
        let mut refusal_body = Packer::new(Encoding::Xdr);
        refusal_body.pack_int(PvmError::OutOfRes.code());
        assert_eq!(unpack_tids(refusal_body.finish()), Err(PvmError::OutOfRes));
    }
}
