//! All ranks succeed or all fail.

use std::sync::Arc;

use crate::{Error, ErrorKind, Result, communicator::Communicator};

/// This rank's result if every rank has one; otherwise an error on every rank, its own or another's.
pub(super) fn agree<T>(comm: &Arc<dyn Communicator>, result: Result<T>) -> Result<T> {
    let text = result
        .as_ref()
        .map_or_else(|error| error.to_string(), |_| String::new());
    let failed = gather(comm, text.as_bytes())?;
    match (result, failed.iter().position(|text| !text.is_empty())) {
        (Err(own), _) => Err(own),
        (Ok(value), None) => Ok(value),
        (Ok(_), Some(rank)) => Err(Error::new(
            ErrorKind::File,
            "write_checkpoint",
            format!("rank {rank} failed, so no checkpoint was made"),
        )
        .with("rank", rank)
        .caused_by(String::from_utf8_lossy(&failed[rank]).into_owned())),
    }
}

/// Every rank's bytes, on every rank.
fn gather(comm: &Arc<dyn Communicator>, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let world = comm.world_size();
    let mut lengths = vec![0i64; world];
    let own = [bytes.len() as i64];
    comm.all_gather(
        own.as_slice().into(),
        (&mut lengths).into(),
        &vec![1; world],
    )?
    .wait()?;
    let counts: Vec<usize> = lengths.iter().map(|&n| n as usize).collect();
    let mut all = vec![0u8; counts.iter().sum()];
    if !all.is_empty() {
        comm.all_gather(bytes.into(), (&mut all).into(), &counts)?
            .wait()?;
    }
    let mut rest = all.as_slice();
    Ok((counts.into_iter())
        .map(|count| {
            let (own, others) = rest.split_at(count);
            rest = others;
            own.to_vec()
        })
        .collect())
}

/// Every rank's bytes in rank order on rank 0, nothing elsewhere.
pub(super) fn collect(comm: &Arc<dyn Communicator>, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    if comm.rank() != 0 {
        let length = [bytes.len() as i64];
        comm.send(length.as_slice().into(), 0)?.wait()?;
        comm.send((&bytes).into(), 0)?.wait()?;
        return Ok(Vec::new());
    }
    let mut all = vec![bytes];
    for rank in 1..comm.world_size() {
        let mut length = [0i64];
        comm.receive(length.as_mut_slice().into(), rank)?.wait()?;
        let mut bytes = vec![0u8; length[0] as usize];
        comm.receive((&mut bytes).into(), rank)?.wait()?;
        all.push(bytes);
    }
    Ok(all)
}
