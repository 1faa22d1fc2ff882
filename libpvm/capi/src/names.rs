//! Names of reserved message tags, debug bits and error codes, as PVM prints them.

const TC_NAMES: [&str; 12] = [
    "TC_CONREQ",
    "TC_CONACK",
    "TC_TASKEXIT",
    "TC_NOOP",
    "TC_OUTPUT",
    "TC_SETTRACE",
    "TC_SETTMASK",
    "TC_SETTRCBUF",
    "TC_SETTRCOPT",
    "TC_SHMAT",
    "TC_OUTPUTX",
    "TC_SIBLINGS",
];
const SM_NAMES: [&str; 17] = [
    "SM_SPAWN",
    "SM_EXEC",
    "SM_EXECACK",
    "SM_TASK",
    "SM_CONFIG",
    "SM_ADDHOST",
    "SM_DELHOST",
    "SM_ADD",
    "SM_ADDACK",
    "SM_NOTIFY",
    "SM_TASKX",
    "SM_HOSTX",
    "SM_HANDOFF",
    "SM_SCHED",
    "SM_STHOST",
    "SM_STHOSTACK",
    "SM_STTASK",
];

/// Returns the name of a reserved tag (`TC_*`, `SM_*`); `None` for other tags.
pub(crate) fn tag_name(tag: i32) -> Option<&'static str> {
    let index = ((tag as u32) & 0xffff).checked_sub(1)? as usize;
    match (tag as u32) >> 16 {
        0x8003 => TC_NAMES.get(index).copied(),
        0x8004 => SM_NAMES.get(index).copied(),
        _ => None,
    }
}

/// Names of the bits of PVM's debug mask, lowest bit first.
const DEBUG_BIT_NAMES: [&str; 16] = [
    "pkt", "msg", "tsk", "slv", "hst", "sel", "net", "mpp", "sch", "app", "wai", "mem", "sem",
    "lck", "rtg", "mbx",
];

/// Returns the names of the bits that are set in a debug mask, separated by commas.
pub(crate) fn debug_bit_names(mask: i32) -> String {
    let set_bit_names = DEBUG_BIT_NAMES
        .iter()
        .enumerate()
        .filter(|(bit, _)| mask >> bit & 1 == 1);
    set_bit_names
        .map(|(_, name)| *name)
        .collect::<Vec<_>>()
        .join(",")
}

const ERROR_CODES: [(&str, i32); 32] = [
    ("PvmOk", 0),
    ("PvmBadParam", -2),
    ("PvmMismatch", -3),
    ("PvmOverflow", -4),
    ("PvmNoData", -5),
    ("PvmNoHost", -6),
    ("PvmNoFile", -7),
    ("PvmDenied", -8),
    ("PvmNoMem", -10),
    ("PvmBadMsg", -12),
    ("PvmSysErr", -14),
    ("PvmNoBuf", -15),
    ("PvmNoSuchBuf", -16),
    ("PvmNullGroup", -17),
    ("PvmDupGroup", -18),
    ("PvmNoGroup", -19),
    ("PvmNotInGroup", -20),
    ("PvmNoInst", -21),
    ("PvmHostFail", -22),
    ("PvmNoParent", -23),
    ("PvmNotImpl", -24),
    ("PvmDSysErr", -25),
    ("PvmBadVersion", -26),
    ("PvmOutOfRes", -27),
    ("PvmDupHost", -28),
    ("PvmCantStart", -29),
    ("PvmAlready", -30),
    ("PvmNoTask", -31),
    ("PvmNotFound", -32),
    ("PvmExists", -33),
    ("PvmHostrNMstr", -34),
    ("PvmParentNotSet", -35),
];

/// Returns the error code with this name in `pvm3.h`; `None` for an unknown name.
pub(crate) fn error_code(name: &str) -> Option<i32> {
    ERROR_CODES
        .iter()
        .find(|(entry_name, _)| *entry_name == name)
        .map(|(_, code)| *code)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reserved tags and error codes have the names of `pvm3.h`; other tags and codes have no name.
    #[test]
    fn reserved_tags_and_errors_have_names() {
        assert_eq!(tag_name(sempa_proto::sm::SM_SPAWN), Some("SM_SPAWN"));
        assert_eq!(tag_name(sempa_proto::sm::SM_STTASK), Some("SM_STTASK"));
        assert_eq!(tag_name(0x8003_0005_u32 as i32), Some("TC_OUTPUT"));
        assert_eq!(tag_name(0x8003_000c_u32 as i32), Some("TC_SIBLINGS"));
        assert_eq!(
            (tag_name(5), tag_name(-1), tag_name(0x8004_0012_u32 as i32)),
            (None, None, None)
        );
        assert_eq!(
            (error_code("PvmDupHost"), error_code("x")),
            (Some(-28), None)
        );
    }
}
