//! Implements `pvm_getopt` and `pvm_setopt`.
//!
//! The option numbers in this module are the `Pvm*` constants of `pvm3.h`.

use crate::data::{
    pvmautoerr, pvmctrc, pvmdebmask, pvmfrgsiz, pvmmytid, pvmnoreset, pvmnoresetindex, pvmrescode,
    pvmrouteopt, pvmshowtaskid, pvmtrc,
};
use crate::requests;
use crate::session;
use sempa_proto::task::Sink;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

/// Minimum fragment size that a program may request, in bytes.
const FRAGMENT_BYTES_MIN: i32 = 52;
/// Maximum fragment size that a program may request, in bytes.
const FRAGMENT_BYTES_MAX: i32 = 1 << 20;
/// Value of `PvmRoute` that forbids direct routes (`PvmDontRoute`).
pub(crate) const ROUTE_NONE: i32 = 1;

/// Returns the variable that stores the option; `None` for an option that this library does not
/// have.
fn option_variable(option: i32) -> Option<&'static AtomicI32> {
    Some(match option {
        1 => &pvmrouteopt,
        2 => &pvmdebmask,
        3 => &pvmautoerr,
        4 => &pvmctrc.out_tid,
        5 => &pvmctrc.out_tag,
        6 => &pvmctrc.trace_tid,
        7 => &pvmctrc.trace_tag,
        8 => &pvmctrc.trace_buf,
        9 => &pvmctrc.trace_opt,
        10 => &pvmfrgsiz,
        11 => &pvmrescode,
        12 => &pvmtrc.out_tid,
        13 => &pvmtrc.out_tag,
        14 => &pvmtrc.trace_tid,
        15 => &pvmtrc.trace_tag,
        16 => &pvmtrc.trace_buf,
        17 => &pvmtrc.trace_opt,
        18 => &pvmshowtaskid,
        21 => &pvmctrc.out_ctx,
        22 => &pvmctrc.trace_ctx,
        23 => &pvmtrc.out_ctx,
        24 => &pvmtrc.trace_ctx,
        25 => &pvmnoreset,
        _ => return None,
    })
}

/// Returns the value of an option.
///
/// # Errors
/// `BadParam` for an unknown option.
pub(crate) fn read_option(option: i32) -> PvmResult<i32> {
    option_variable(option)
        .map(|variable| variable.load(Relaxed))
        .ok_or(PvmError::BadParam)
}

/// Sets an option and returns its previous value.
///
/// # Errors
/// `BadParam` for an unknown option or an invalid value, `NotImpl` for an option that this library
/// cannot set.
pub(crate) fn set_option(option: i32, value: i32) -> PvmResult<i32> {
    if matches!(option, 19 | 20 | 23 | 24) {
        return Err(PvmError::NotImpl);
    }
    let variable = option_variable(option).ok_or(PvmError::BadParam)?;
    let previous_value = variable.load(Relaxed);
    let is_valid = match option {
        1 => (1..=3).contains(&value),
        9 | 17 => (1..=3).contains(&value),
        10 => (FRAGMENT_BYTES_MIN..=FRAGMENT_BYTES_MAX).contains(&value),
        4 => is_allowed_sink(value, &pvmtrc.out_tid, &pvmtrc.out_tag, &pvmctrc.out_tag),
        6 => is_allowed_sink(
            value,
            &pvmtrc.trace_tid,
            &pvmtrc.trace_tag,
            &pvmctrc.trace_tag,
        ),
        5 => is_allowed_code(value, &pvmctrc.out_tid, &pvmtrc.out_tag),
        7 => is_allowed_code(value, &pvmctrc.trace_tid, &pvmtrc.trace_tag),
        21 => is_allowed_code(value, &pvmctrc.out_tid, &pvmtrc.out_ctx),
        22 => is_allowed_code(value, &pvmctrc.trace_tid, &pvmtrc.trace_ctx),
        12..=15 => {
            set_own_sink(option, value)?;
            return Ok(previous_value);
        }
        25 => {
            set_no_reset(value)?;
            return Ok(previous_value);
        }
        _ => true,
    };
    if !is_valid {
        return Err(PvmError::BadParam);
    }
    if matches!(option, 16 | 17) {
        crate::trace::send_collected_records();
    }
    variable.store(value, Relaxed);
    if option == 1
        && let Some(rt) = session::lock().connected_runtime()
    {
        rt.set_accepts_routes(value != ROUTE_NONE);
    }
    Ok(previous_value)
}

/// True if `tid` is allowed as the destination of the children's output or trace. Allowed are: no
/// task, this task, or the destination of this task's own output or trace. The own destination is
/// allowed only if the tags are equal, because a collector in another task knows only its own tag.
fn is_allowed_sink(tid: i32, own_tid: &AtomicI32, own_tag: &AtomicI32, tag: &AtomicI32) -> bool {
    tid == 0
        || (tid > 0 && tid == pvmmytid.load(Relaxed))
        || (tid == own_tid.load(Relaxed) && tag.load(Relaxed) == own_tag.load(Relaxed))
}

/// True if a tag or context may be set. Any value is allowed unless the messages are sent to a
/// collector in another task. In this case the value must be the tag or context that this task
/// itself uses.
fn is_allowed_code(code: i32, tid: &AtomicI32, own_code: &AtomicI32) -> bool {
    let tid = tid.load(Relaxed);
    tid <= 0 || tid == pvmmytid.load(Relaxed) || code == own_code.load(Relaxed)
}

/// Sets the destination or tag of this task's own output or trace, which is also the default for
/// its children. The daemon redirects the output, because the daemon reads the task's output pipe.
/// The values 0 (no destination) and −1 (no destination, not even an inherited one) need no daemon,
/// so that a console can set these values before a daemon runs.
fn set_own_sink(option: i32, value: i32) -> PvmResult<()> {
    let (own_fields, child_fields) = if option < 14 {
        (
            [&pvmtrc.out_tid, &pvmtrc.out_ctx, &pvmtrc.out_tag],
            [&pvmctrc.out_tid, &pvmctrc.out_ctx, &pvmctrc.out_tag],
        )
    } else {
        (
            [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag],
            [&pvmctrc.trace_tid, &pvmctrc.trace_ctx, &pvmctrc.trace_tag],
        )
    };
    let [tid, ctx, tag] = own_fields.map(|field| field.load(Relaxed));
    let is_tid = matches!(option, 12 | 14);
    if !is_tid && tid <= 0 {
        return Err(PvmError::BadParam);
    }
    if value > 0 && is_tid {
        session::runtime()?;
    }
    let (new_tid, new_tag) = if is_tid { (value, tag) } else { (tid, value) };
    if option < 14 && (new_tid > 0 || tid > 0) {
        requests::set_output(Sink {
            tid: Tid::from_raw(new_tid.max(0)),
            ctx,
            tag: new_tag,
        })?;
    }
    if option >= 14 && (new_tid > 0 || tid > 0) {
        crate::trace::send_collected_records();
        requests::set_trace(Sink {
            tid: Tid::from_raw(new_tid.max(0)),
            ctx,
            tag: new_tag,
        })?;
    }
    for (field, value) in own_fields
        .iter()
        .chain(&child_fields)
        .zip([new_tid, ctx, new_tag].into_iter().cycle())
    {
        field.store(value, Relaxed);
    }
    Ok(())
}

/// Adds this task to the no-reset class of the mailbox if `value` is nonzero; otherwise removes
/// this task from the class. A reset does not end the tasks of this class.
fn set_no_reset(value: i32) -> PvmResult<()> {
    let is_enabled = value != 0;
    if is_enabled && session::lock().connected_runtime().is_none() {
        return Err(PvmError::BadParam);
    }
    let index = pvmnoresetindex.load(Relaxed);
    if is_enabled && index < 0 {
        pvmnoresetindex.store(
            requests::put_own_tid(sempa_proto::sm::NO_RESET_CLASS)?,
            Relaxed,
        );
    }
    if !is_enabled && index >= 0 {
        requests::mailbox_delete(sempa_proto::sm::NO_RESET_CLASS.to_string(), index)?;
        pvmnoresetindex.store(-1, Relaxed);
    }
    pvmnoreset.store(i32::from(is_enabled), Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options accept only their valid values. Setting an option returns its previous value.
    #[test]
    fn options_accept_only_valid_values() {
        assert_eq!(read_option(1), Ok(2));
        assert_eq!(set_option(1, 3), Ok(2));
        assert_eq!(set_option(1, 4), Err(PvmError::BadParam));
        assert_eq!(set_option(1, 2), Ok(3));
        assert_eq!(set_option(10, 51), Err(PvmError::BadParam));
        assert_eq!(set_option(10, 52), Ok(4080));
        assert_eq!(set_option(10, 4080), Ok(52));
        assert_eq!(
            (read_option(19), set_option(19, 1), set_option(23, 0)),
            (
                Err(PvmError::BadParam),
                Err(PvmError::NotImpl),
                Err(PvmError::NotImpl)
            )
        );
        assert_eq!(
            (read_option(0), read_option(26), read_option(-1)),
            (
                Err(PvmError::BadParam),
                Err(PvmError::BadParam),
                Err(PvmError::BadParam)
            )
        );
        assert_eq!(set_option(4, 0x40001), Err(PvmError::BadParam));
        assert_eq!(set_option(25, 1), Err(PvmError::BadParam));
        assert_eq!(
            (set_option(12, -1), read_option(12), read_option(4)),
            (Ok(0), Ok(-1), Ok(-1))
        );
        assert_eq!(set_option(13, 5), Err(PvmError::BadParam));
    }
}
