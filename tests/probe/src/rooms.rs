//! The functions of every room, each compiled with arguments that could be anything.

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::memory::{Buffer, PageList, Posted, Range, Shares};
use o2poll_dataplane::nic::{Nic, RKey};
use o2poll_dataplane::pool::{self, Handle, Pool, Queue};
use o2poll_dataplane::ring;
use o2poll_dataplane::time::Instant;
use o2poll_dataplane::wire::{
    Body, Descriptor, Done, Envelope, Located, Message, Nid, RejectRecord, Why, encode_get_req,
    encode_immediate, encode_put_ack, lnet, ping,
};
use o2poll_soft::{Ports, Soft};

/// Keeps functions alive: their addresses go where the optimiser cannot follow.
macro_rules! keep_all {
    ($($function:expr),* $(,)?) => {
        core::hint::black_box([$($function as *const ()),*])
    };
}

pub(crate) use keep_all;

/// Keeps every room alive.
pub fn keep() {
    rings();
    pools();
    memory();
    values();
    wire();
    soft();
}

fn rings() {
    type Value = (u64, u64);
    keep_all![
        ring::index_ring::<Value>,
        ring::Producer::<'_, Value>::push,
        ring::Producer::<'_, Value>::free,
        ring::Producer::<'_, Value>::push_slice,
        push_iter,
        reserve,
        ring::Consumer::<'_, Value>::pop,
        ring::Consumer::<'_, Value>::len,
        ring::Consumer::<'_, Value>::is_empty,
        ring::Consumer::<'_, Value>::pop_slice,
        drain,
        ring::lap_ring,
        ring::LapProducer::push,
        ring::LapProducer::push_slice,
        ring::LapProducer::room,
        ring::LapConsumer::peek,
        ring::LapConsumer::peek_at,
        ring::LapConsumer::pop,
    ];
}

fn pools() {
    type Value = [u64; 9];
    keep_all![
        Pool::<'_, Value>::new,
        Pool::<'_, Value>::len,
        Pool::<'_, Value>::capacity,
        Pool::<'_, Value>::vacant,
        Pool::<'_, Value>::insert,
        Pool::<'_, Value>::get,
        Pool::<'_, Value>::get_mut,
        Pool::<'_, Value>::remove,
        Pool::<'_, Value>::at,
        Pool::<'_, Value>::cookie,
        Pool::<'_, Value>::by_cookie,
        Pool::<'_, Value>::by_short,
        Pool::<'_, Value>::push_back,
        Pool::<'_, Value>::push_front,
        Pool::<'_, Value>::pop_front,
        Pool::<'_, Value>::take_front,
        Pool::<'_, Value>::unlink,
        Queue::len,
        Handle::from_bits,
        Handle::to_bits,
        pool::pack,
        pool::unpack,
    ];
}

fn memory() {
    keep_all![
        Range::sge,
        Range::bytes,
        Range::bytes_mut,
        Range::split_at,
        PageList::push,
        PageList::pop,
        PageList::length,
        PageList::pieces,
        PageList::write_at,
        PageList::read_at,
        slice,
        chunks,
        chunks_mut,
        Shares::new,
        Shares::share,
        Shares::has,
        Shares::take_back,
        Shares::whole,
        Buffer::new,
        Buffer::bytes,
        Buffer::peek,
        Buffer::post,
        Posted::sge,
        Buffer::sge_at,
        Posted::completed,
    ];
}

fn values() {
    keep_all![
        Instant::after,
        Instant::since,
        RKey::rotated,
        Nid::new,
        Nid::o2ib,
        Nid::lnd,
        Nid::number,
        Nid::address,
        counters,
    ];
}

fn wire() {
    keep_all![
        Message::decode,
        Message::encode,
        Message::encode_as,
        Body::kind,
        encode_immediate,
        encode_get_req,
        encode_put_ack,
        Descriptor::new,
        Descriptor::get,
        Descriptor::only,
        Descriptor::length,
        Descriptor::locate,
        Located::get,
        RejectRecord::decode,
        RejectRecord::encode_as,
        Why::from_code,
        Why::code,
        lnet::Header::decode,
        lnet::Header::is_legal,
        lnet::WireHandle::words,
        lnet::WireHandle::from_words,
        ping::PingInfo::decode,
        ping::encode,
        ping_entries,
        put_done,
    ];
}

fn soft() {
    type Device = Soft<'static, Ports<'static, 'static>>;
    keep_all![
        Device::new,
        Device::register,
        Device::gauges,
        Device::counts,
        <Device as Nic>::capabilities,
        <Device as Nic>::adopt,
        <Device as Nic>::fail,
        <Device as Nic>::retire,
        <Device as Nic>::adopt_window,
        <Device as Nic>::retire_window,
        <Device as Nic>::queue,
        <Device as Nic>::doorbell,
        <Device as Nic>::receive,
        <Device as Nic>::poll,
        <Device as Nic>::arm,
    ];
}

fn reserve(producer: &mut ring::Producer<'_, (u64, u64)>, value: (u64, u64)) -> usize {
    let Some(mut reserved) = producer.reserve(2) else {
        return 0;
    };
    let _ = reserved.push(value);
    let _ = reserved.push(value);
    reserved.left()
}

fn push_iter(producer: &mut ring::Producer<'_, (u64, u64)>, values: &[(u64, u64)]) -> usize {
    producer.push_iter(values.iter().copied())
}

fn drain(consumer: &mut ring::Consumer<'_, (u64, u64)>, most: usize) -> u64 {
    consumer.drain(most).fold(0, |sum, (a, b)| sum ^ a ^ b)
}

fn ping_entries(info: &ping::PingInfo<'_>) -> u64 {
    let primary = info.primary().map_or(0, |nid| nid.0);
    info.entries().fold(primary, |sum, entry| sum ^ entry.nid.0)
}

fn put_done(envelope: &Envelope, done: Done, to: &mut [u8; 4096]) -> u32 {
    let message = Message {
        envelope: *envelope,
        body: Body::PutDone(done),
    };
    message.encode(to).unwrap_or(0)
}

fn slice(list: &PageList<'_>, offset: u64, length: u32) -> u64 {
    list.slice(offset, length).fold(0, |sum, piece| {
        sum ^ piece.address ^ u64::from(piece.length)
    })
}

fn chunks(list: &PageList<'_>) -> u64 {
    list.chunks()
        .flatten()
        .fold(0, |sum, byte| sum ^ u64::from(*byte))
}

fn chunks_mut(list: &mut PageList<'_>, value: u8) {
    list.chunks_mut().for_each(|chunk| chunk.fill(value));
}

fn counters(counters: &Counters, amount: u64) -> u64 {
    counters.bytes.add(amount);
    counters.keys_alive.set(amount);
    counters.each().fold(0, |sum, (_, value)| sum ^ value)
}
