//! Support for programs that use PVM's group server directly (Debian's `pvm_gstat` and
//! `pvmgroups`).
//!
//! Sempa has no server task. Such a program gets its own tid as the server's tid. Two message
//! handlers in the program's own library answer the messages that the program sends to this tid:
//! the request for the list of groups, and the request to print all groups. All other operations
//! use the calls of the group library.

use crate::pvm::{self, MemberChannel};
use sempa_proto::group::GroupCall;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, CString, c_int};
use std::fmt::Write;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Tag of the request to print all groups.
const TAG_DUMP: c_int = 9;
/// Tag of the request for the list of all groups, and of the reply.
const TAG_LIST: c_int = 10;

/// Ids of the message handlers for the list request (index 0) and the print request (index 1); −1
/// if not installed.
static HANDLER_IDS: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

/// Returns the tid to which the program sends messages for the group server: this task's own tid.
/// Installs the message handlers.
///
/// # Errors
/// `SysErr` if the daemon cannot be reached.
pub(crate) fn server_tid() -> PvmResult<c_int> {
    let own_tid = pvm::mytid()?;
    ensure_handler(&HANDLER_IDS[0], own_tid, TAG_LIST, send_list)?;
    ensure_handler(&HANDLER_IDS[1], own_tid, TAG_DUMP, print_groups)?;
    Ok(own_tid)
}

fn ensure_handler(
    handler_id: &AtomicI32,
    own_tid: c_int,
    tag: c_int,
    handler: pvm::MessageHandler,
) -> PvmResult<()> {
    if handler_id.load(Relaxed) < 0 {
        handler_id.store(pvm::add_handler(own_tid, tag, handler)?, Relaxed);
    }
    Ok(())
}

/// A group as the group service lists it.
struct Group {
    name: CString,
    member_count: c_int,
    /// Number of members that must reach the barrier; −1 without a barrier.
    barrier_count: c_int,
    /// Tids of the members by instance number; −1 for a free instance.
    members: Vec<c_int>,
    waiting_tids: Vec<c_int>,
}

/// Queries all groups. Decodes the groups from the integers that
/// [`sempa_proto::group::encode_group_list`] encoded.
fn query_groups() -> PvmResult<Vec<Group>> {
    let integers = pvm::request_list(GroupCall::List, c"")?;
    let mut unread_integers = &integers[..];
    let mut take_integers = |count: c_int| {
        let taken_integers = usize::try_from(count)
            .ok()
            .and_then(|count| unread_integers.split_off(..count));
        taken_integers.ok_or(PvmError::BadMsg)
    };
    let mut groups = Vec::new();
    for _ in 0..take_integers(1)?[0] {
        let name_len = take_integers(1)?[0];
        let name: Vec<u8> = take_integers(name_len)?
            .iter()
            .map(|byte| *byte as u8)
            .collect();
        let &[size, instance_count, barrier_count, waiting_count] = take_integers(4)? else {
            return Err(PvmError::BadMsg);
        };
        groups.push(Group {
            name: CString::new(name).map_err(|_| PvmError::BadMsg)?,
            member_count: size,
            barrier_count,
            members: take_integers(instance_count)?.to_vec(),
            waiting_tids: take_integers(waiting_count)?.to_vec(),
        });
    }
    Ok(groups)
}

/// Message handler for the list request: sends the list of groups as a message to this task.
extern "C" fn send_list(_request: c_int) -> c_int {
    // The reply has the tag of the request and must not reach this handler again.
    pvm::remove_handler(HANDLER_IDS[0].swap(-1, Relaxed));
    let send_reply = || {
        let (own_tid, groups) = (pvm::mytid()?, query_groups()?);
        MemberChannel::open().send_packed(own_tid, TAG_LIST, || {
            pvm::pack_ints(&[groups.len() as c_int])?;
            for group in &groups {
                pvm::pack_ints(&[group.name.as_bytes_with_nul().len() as c_int])?;
                pvm::pack_text(&group.name)?;
                pvm::pack_ints(&[
                    group.member_count,
                    group.members.len() as c_int,
                    group.barrier_count,
                    group.waiting_tids.len() as c_int,
                ])?;
                pvm::pack_ints(&group.members)?;
                pvm::pack_ints(&group.waiting_tids)?;
            }
            Ok(())
        })
    };
    send_reply().map_or_else(
        |error: PvmError| pvm::report_error(c"pvm_gstat", error),
        |()| 0,
    )
}

/// Message handler for the print request.
extern "C" fn print_groups(_request: c_int) -> c_int {
    dump_groups(c"pvmgroups")
}

/// Prints all groups to this task's standard error. `function_name` names the caller in a report of
/// an error. Returns 0 or the error code.
pub(crate) fn dump_groups(function_name: &CStr) -> c_int {
    let print_text = || {
        let (own_tid, groups) = (pvm::mytid()?, query_groups()?);
        let mut text = format!("DUMP {own_tid:#x}, {} groups:\n", groups.len());
        for group in &groups {
            let name = group.name.to_string_lossy();
            let (size, barrier_count, waiting_count) = (
                group.member_count,
                group.barrier_count,
                group.waiting_tids.len(),
            );
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                " group: {name}  size: {size} barrier_count: {barrier_count} barrier_reached {waiting_count}"
            );
            text += "  Tids: ";
            for (instance, tid) in group
                .members
                .iter()
                .enumerate()
                .filter(|(_, tid)| **tid >= 0)
            {
                let _ = write!(text, "({instance},  {tid:#x}) ");
            }
            text += "\n";
        }
        eprint!("{text}");
        Ok(())
    };
    print_text().map_or_else(
        |error: PvmError| pvm::report_error(function_name, error),
        |()| 0,
    )
}
