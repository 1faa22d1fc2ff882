//! PVM's documented messages between tasks, resource managers and daemons (`SM_*`), in PVM's
//! default encoding.
//!
//! They are ordinary PVM messages in context 0; the wait id pairs request and reply. Therefore a
//! resource manager written for PVM 3.4 works with Sempa's daemons, and Sempa's resource manager
//! works with PVM's.

use crate::body::{Encoding, Packer, Unpacker};
use crate::error::{PvmError, PvmResult};
use crate::ids::{HostId, Micros, Tid};
use crate::migration::Usage;
use crate::task::{Sink, SpawnRequest};
use bytes::Bytes;

const BASE: i32 = 0x8004_0001_u32 as i32;

/// Task to resource manager and back: `pvm_spawn`.
pub const SM_SPAWN: i32 = BASE;
/// Resource manager to daemon: start tasks on the daemon's host.
pub const SM_EXEC: i32 = BASE + 1;
/// Daemon to resource manager: tasks were started, or a task from a command line has connected.
pub const SM_EXECACK: i32 = BASE + 2;
/// Task to resource manager and back: `pvm_tasks`.
pub const SM_TASK: i32 = BASE + 3;
/// Task to resource manager and back: `pvm_config`.
pub const SM_CONFIG: i32 = BASE + 4;
/// Task to resource manager and back: `pvm_addhosts`.
pub const SM_ADDHOST: i32 = BASE + 5;
/// Task to resource manager and back: `pvm_delhosts`.
pub const SM_DELHOST: i32 = BASE + 6;
/// Resource manager to master: add hosts.
pub const SM_ADD: i32 = BASE + 7;
/// Master to resource manager: hosts were added.
pub const SM_ADDACK: i32 = BASE + 8;
/// Task to resource manager: `pvm_notify`.
pub const SM_NOTIFY: i32 = BASE + 9;
/// Daemon to resource manager: a task ended.
pub const SM_TASKX: i32 = BASE + 10;
/// Master to its resource manager: a host left the virtual machine.
pub const SM_HOSTX: i32 = BASE + 11;
/// Resource manager to its daemon: another resource manager replaces it.
pub const SM_HANDOFF: i32 = BASE + 12;
/// Task to resource manager and back: `pvm_reg_rm`.
pub const SM_SCHED: i32 = BASE + 13;
/// Master to hoster: start daemons.
pub const SM_STHOST: i32 = BASE + 14;
/// Hoster to master: daemons were started.
pub const SM_STHOSTACK: i32 = BASE + 15;
/// Daemon to tasker: start a task.
pub const SM_STTASK: i32 = BASE + 16;

/// Resource manager to task, not in PVM: the task's request [`SM_SPAWN`] starts or stops waiting
/// for hosts; none of its tasks has been started. If the resource manager dies, the task may send
/// the request to the next one.
pub const SM_SPAWN_WAITS: i32 = BASE + 0x100;
/// Resource manager to task, not in PVM: grants a [`PlacementLease`], hosts for the task's next
/// spawns. The lease applies to requests like the one with this wait id; the task can start them
/// without a request to the resource manager.
pub const SM_PLACEMENT_LEASE: i32 = BASE + 0x101;
/// Daemon to resource manager, not in PVM: tasks were started by a placement lease. The message has
/// the wait id of the lease.
pub const SM_PLACEMENT_LEASE_USED: i32 = BASE + 0x102;

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
    out.int(sink.tid.raw()).int(sink.ctx).int(sink.tag);
}

fn unpack_sink(from: &mut Unpacker) -> PvmResult<Sink> {
    Ok(Sink {
        tid: Tid::from_raw(from.int()?),
        ctx: from.int()?,
        tag: from.int()?,
    })
}

fn unpack_byte_strings(from: &mut Unpacker) -> PvmResult<Vec<Vec<u8>>> {
    let count = usize::try_from(from.int()?).map_err(|_| PvmError::BadMsg)?;
    if count.saturating_mul(4) > from.remaining() {
        return Err(PvmError::NoData);
    }
    (0..count).map(|_| Ok(from.str()?.to_vec())).collect()
}

fn pack_time(out: &mut Packer, at: Micros) {
    out.int((at.0 >> 32) as i32).int(at.0 as i32);
}

fn unpack_time(from: &mut Unpacker) -> PvmResult<Micros> {
    let word = |from: &mut Unpacker| from.int().map(|word| u64::from(word.cast_unsigned()));
    Ok(Micros(word(from)? << 32 | word(from)?))
}

/// Encodes the body of [`SM_SPAWN_WAITS`]. `since` is the time of day at which the request started
/// to wait; `None` if the request has stopped waiting.
pub fn pack_spawn_waits(since: Option<Micros>) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    pack_time(&mut out, since.unwrap_or_default());
    out.finish()
}

/// Decodes the body of [`SM_SPAWN_WAITS`] as encoded by [`pack_spawn_waits`].
///
/// # Errors
/// [`PvmError::NoData`] if the body is too short.
pub fn unpack_spawn_waits(body: Bytes) -> PvmResult<Option<Micros>> {
    Ok(Some(unpack_time(&mut Unpacker::xdr(body))?).filter(|at| *at != Micros::default()))
}

/// Maximum number of hosts in a placement lease.
pub const LEASE_HOSTS_MAX: usize = 3 * LEASE_TASKS_MAX;
/// Maximum number of tasks in a request for which a placement lease can be granted. For larger
/// requests the round trip to the resource manager is short compared to the start of the tasks.
pub const LEASE_TASKS_MAX: usize = 16;

/// A placement lease: hosts that a resource manager assigns to future spawn requests of a task.
///
/// A task that spawns repeatedly, by requests for the same number of tasks with the same program,
/// place, flags and environment, need not send each request to the resource manager. Modeled on
/// Condor's claims, by which a queue starts successive jobs on a machine without asking the
/// matchmaker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementLease {
    /// Hosts of the next tasks, in order of use; at most [`LEASE_HOSTS_MAX`].
    pub hosts: Vec<HostId>,
    /// Time for which the lease is valid after the last spawn request to which it applies.
    pub valid_for: Micros,
}

/// Encodes the body of [`SM_PLACEMENT_LEASE`].
pub fn pack_placement_lease(lease: &PlacementLease) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    pack_time(&mut out, lease.valid_for);
    out.int(lease.hosts.len() as i32)
        .items(lease.hosts.iter().map(|host| host.tid().raw()));
    out.finish()
}

/// Decodes [`SM_PLACEMENT_LEASE`].
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_placement_lease(body: Bytes) -> PvmResult<PlacementLease> {
    let mut from = Unpacker::xdr(body);
    let (span, count) = (unpack_time(&mut from)?, from.int()?);
    if usize::try_from(count).is_ok_and(|count| count > LEASE_HOSTS_MAX) {
        return Err(PvmError::BadMsg);
    }
    let hosts = from
        .ints(count)?
        .into_iter()
        .map(|raw| Tid::from_raw(raw).birth_host().ok_or(PvmError::BadMsg));
    Ok(PlacementLease {
        hosts: hosts.collect::<PvmResult<_>>()?,
        valid_for: span,
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
    out.int(lease_use.spawner.raw())
        .int(lease_use.tasks.len() as i32);
    for (host, tid) in &lease_use.tasks {
        out.int(host.tid().raw()).int(tid.raw());
    }
    out.finish()
}

/// Decodes [`SM_PLACEMENT_LEASE_USED`].
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_placement_lease_use(body: Bytes) -> PvmResult<PlacementLeaseUse> {
    let mut from = Unpacker::xdr(body);
    let (by, count) = (Tid::from_raw(from.int()?), from.int()?);
    let count = usize::try_from(count)
        .ok()
        .filter(|count| (1..=LEASE_TASKS_MAX).contains(count));
    let mut task = || {
        let (host, tid) = (Tid::from_raw(from.int()?), Tid::from_raw(from.int()?));
        Ok((
            host.birth_host().ok_or(PvmError::BadMsg)?,
            Some(tid)
                .filter(|tid| tid.is_task())
                .ok_or(PvmError::BadMsg)?,
        ))
    };
    let tasks = (0..count.ok_or(PvmError::BadMsg)?)
        .map(|_| task())
        .collect::<PvmResult<_>>()?;
    if !by.is_task() {
        return Err(PvmError::BadMsg);
    }
    Ok(PlacementLeaseUse { spawner: by, tasks })
}

/// Encodes the body of a request [`SM_SPAWN`]. `since` is the time at which the request started to
/// wait with a previous resource manager, which has died; `None` for a new request.
pub fn pack_spawn(request: &SpawnRequest, since: Option<Micros>) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.str(request.file.as_bytes())
        .int(request.flags)
        .str(request.place.as_bytes())
        .int(request.count as i32);
    out.strs(&request.args);
    pack_sink(&mut out, request.output);
    pack_sink(&mut out, request.trace);
    out.strs(&request.env);
    if let Some(since) = since {
        // Not in PVM, which ignores bytes after its own fields.
        pack_time(&mut out, since);
    }
    out.finish()
}

/// Decodes a request [`SM_SPAWN`]. Also returns the time at which the request started to wait with
/// a previous resource manager; `None` for a new request.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_spawn(body: Bytes) -> PvmResult<(SpawnRequest, Option<Micros>)> {
    let mut from = Unpacker::xdr(body);
    let (file, flags, place) = (from.string()?, from.int()?, from.string()?);
    let count = u32::try_from(from.int()?).map_err(|_| PvmError::BadMsg)?;
    let args = unpack_byte_strings(&mut from)?;
    let (output, trace) = (unpack_sink(&mut from)?, unpack_sink(&mut from)?);
    let env = unpack_byte_strings(&mut from)?;
    let since = if from.remaining() > 0 {
        unpack_time(&mut from).ok()
    } else {
        None
    };
    Ok((
        SpawnRequest {
            file,
            args,
            flags,
            place,
            count,
            env,
            output,
            trace,
        },
        since,
    ))
}

/// Encodes the body of [`SM_EXEC`], which starts tasks on the daemon's host for `parent`. `first`
/// is the position of the first of these tasks in the whole spawn, and `total` the number of tasks
/// in the whole spawn.
pub fn pack_exec(parent: Tid, request: &SpawnRequest, first: i32, total: i32) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.int(parent.raw())
        .str(request.file.as_bytes())
        .int(request.flags)
        .int(request.count as i32);
    out.strs(&request.args);
    pack_sink(&mut out, request.output);
    pack_sink(&mut out, request.trace);
    out.strs(&request.env).int(first).int(total);
    // Not in PVM, which ignores bytes after its own fields: the working directory part of `place`.
    out.str(request.place.as_bytes());
    out.finish()
}

/// Decodes the body of [`SM_EXEC`]. The two ints `first` and `total` must be present; their values,
/// and any bytes after them, are not checked.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_exec(body: Bytes) -> PvmResult<(Tid, SpawnRequest)> {
    let mut from = Unpacker::xdr(body);
    let parent = Tid::from_raw(from.int()?);
    let (file, flags) = (from.string()?, from.int()?);
    let count = u32::try_from(from.int()?).map_err(|_| PvmError::BadMsg)?;
    let args = unpack_byte_strings(&mut from)?;
    let (output, trace) = (unpack_sink(&mut from)?, unpack_sink(&mut from)?);
    let env = unpack_byte_strings(&mut from)?;
    let _position = (from.int()?, from.int()?);
    let place = if from.remaining() > 0 {
        from.string().unwrap_or_default()
    } else {
        String::new()
    };
    Ok((
        parent,
        SpawnRequest {
            file,
            args,
            flags,
            place,
            count,
            env,
            output,
            trace,
        },
    ))
}

/// Encodes the body of the replies [`SM_SPAWN`] and [`SM_EXECACK`]: a count, then a tid or an error
/// code for each task.
pub fn pack_tids(results: &[Result<Tid, PvmError>]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.int(results.len() as i32);
    out.items(
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
    let mut from = Unpacker::xdr(body);
    let count = from.int()?;
    if count < 0 {
        return Err(PvmError::from_code(count).unwrap_or(PvmError::BadMsg));
    }
    let words = from.ints(count)?;
    let tid = |raw: i32| {
        let tid = Tid::from_raw(raw);
        if tid.is_task() {
            Ok(tid)
        } else {
            Err(PvmError::from_code(raw).unwrap_or(PvmError::BadMsg))
        }
    };
    Ok(words.into_iter().map(tid).collect())
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
    pub position: [i32; 3],
}

/// Encodes the body of [`SM_STTASK`].
pub fn pack_tasker_start(order: &TaskerStartRequest) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.int(order.tid.raw()).int(order.flags).str(&order.path);
    out.strs(&order.argv).strs(&order.env).items(order.position);
    out.finish()
}

/// Report about a task that has ended or could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskExit {
    pub tid: Tid,
    /// Wait status of the task's process.
    pub status: i32,
    /// Resources that the task used.
    pub used: Usage,
}

/// Encodes the body of [`SM_TASKX`].
pub fn pack_task_exit(end: &TaskExit) -> Bytes {
    let (seconds, rest) = (
        |t: Micros| (t.0 / 1_000_000) as i32,
        |t: Micros| (t.0 % 1_000_000) as i32,
    );
    let Usage { user, system, .. } = end.used;
    let mut out = Packer::new(Encoding::Xdr);
    out.items([
        end.tid.raw(),
        end.status,
        seconds(user),
        rest(user),
        seconds(system),
        rest(system),
    ]);
    out.finish()
}

/// Decodes the body of [`SM_TASKX`]. Missing times count as 0.
///
/// # Errors
/// [`PvmError::NoData`] if tid or status are missing.
pub fn unpack_task_exit(body: Bytes) -> PvmResult<TaskExit> {
    let mut from = Unpacker::xdr(body);
    let (tid, status) = (Tid::from_raw(from.int()?), from.int()?);
    let mut time = || {
        let (seconds, micros) = (
            from.int().unwrap_or(0).max(0) as u64,
            from.int().unwrap_or(0).max(0) as u64,
        );
        Micros(seconds * 1_000_000 + micros)
    };
    let (user, system) = (time(), time());
    Ok(TaskExit {
        tid,
        status,
        used: Usage {
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
    pub host: Tid,
    /// Value of the host-file option `so=`; empty if the option is not set.
    pub option: String,
    /// Login name for ssh: `host` or `user@host`.
    pub login: String,
    /// Command to run on the new host.
    pub command: String,
    /// Name of the virtual machine, sent to the command's standard input as `PVM_VMID=…`; nothing
    /// is sent if it is empty.
    pub vmid: String,
}

/// Encodes the body of [`SM_STHOST`].
pub fn pack_hoster_starts(orders: &[HosterStartRequest]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.int(orders.len() as i32);
    for order in orders {
        out.int(order.host.raw())
            .str(order.option.as_bytes())
            .str(order.login.as_bytes());
        // PVM's additional command for Windows hosts is always empty.
        out.str(order.command.as_bytes())
            .str(b"")
            .str(order.vmid.as_bytes());
    }
    out.finish()
}

/// Decodes the body of [`SM_STHOSTACK`]. Returns for each host its tid and the line that the daemon
/// on it printed, or the name of an error.
///
/// # Errors
/// [`PvmError::NoData`] or [`PvmError::BadMsg`] if the body is malformed.
pub fn unpack_hoster_reply(body: Bytes) -> PvmResult<Vec<(Tid, String)>> {
    let mut from = Unpacker::xdr(body);
    let count = usize::try_from(from.int()?).map_err(|_| PvmError::BadMsg)?;
    if count.saturating_mul(8) > from.remaining() {
        return Err(PvmError::NoData);
    }
    (0..count)
        .map(|_| Ok((Tid::from_raw(from.int()?), from.string()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> SpawnRequest {
        SpawnRequest {
            file: "hello".into(),
            args: vec![b"-v".to_vec(), b"\xff".to_vec()],
            flags: 64,
            place: ":/var".into(),
            count: 3,
            env: vec![b"PVMCTX=0x0".to_vec()],
            output: Sink {
                tid: Tid::from_raw(0x40001),
                ctx: 5,
                tag: 6,
            },
            trace: Sink::default(),
        }
    }

    #[test]
    fn spawn_and_exec_round_trip() {
        assert_eq!(
            unpack_spawn(pack_spawn(&request(), None)),
            Ok((request(), None))
        );
        let since = Some(Micros(0x6_1234_8765_4321));
        assert_eq!(
            unpack_spawn(pack_spawn(&request(), since)),
            Ok((request(), since))
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
            unpack_exec(pack_exec(parent, &request(), 0, 3)),
            Ok((parent, request()))
        );
    }

    #[test]
    fn exec_requires_only_the_two_trailing_ints() {
        let whole = pack_exec(Tid::NONE, &request(), 0, 3);
        let mut place = Packer::new(Encoding::Xdr);
        place.str(request().place.as_bytes());
        let without_place = whole.slice(..whole.len() - place.len());
        assert_eq!(
            unpack_exec(without_place.clone()).map(|(_, r)| r.place),
            Ok(String::new())
        );
        assert_eq!(
            unpack_exec(without_place.slice(..without_place.len() - 4)),
            Err(PvmError::NoData)
        );
    }

    #[test]
    fn task_exit_round_trips_and_times_are_optional() {
        let used = Usage {
            user: Micros(1_500_000),
            system: Micros(7),
            ..Usage::default()
        };
        let end = TaskExit {
            tid: Tid::from_raw(0x40001),
            status: 0x100,
            used,
        };
        let body = pack_task_exit(&end);
        assert_eq!(unpack_task_exit(body.clone()), Ok(end));
        let short = unpack_task_exit(body.slice(..8));
        assert_eq!(
            short,
            Ok(TaskExit {
                used: Usage::default(),
                ..end
            })
        );
        assert_eq!(unpack_task_exit(body.slice(..4)), Err(PvmError::NoData));
    }

    #[test]
    fn hostile_hoster_replies_are_refused() {
        for count in [-1, i32::MAX] {
            let mut out = Packer::new(Encoding::Xdr);
            out.int(count);
            assert!(unpack_hoster_reply(out.finish()).is_err());
        }
        let mut out = Packer::new(Encoding::Xdr);
        out.int(1).int(0x80000).str(b"PvmCantStart");
        assert_eq!(
            unpack_hoster_reply(out.finish()),
            Ok(vec![(Tid::from_raw(0x80000), "PvmCantStart".into())])
        );
    }

    #[test]
    fn tids_and_errors_share_one_list() {
        let results = [Ok(Tid::from_raw(0x40001)), Err(PvmError::NoFile)];
        assert_eq!(unpack_tids(pack_tids(&results)), Ok(results.to_vec()));
        let mut refused = Packer::new(Encoding::Xdr);
        refused.int(PvmError::OutOfRes.code());
        assert_eq!(unpack_tids(refused.finish()), Err(PvmError::OutOfRes));
    }
}
